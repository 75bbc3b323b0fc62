#include "handshake/flags.h"

#include <new>

namespace ft::handshake {

Flags::~Flags() {
  for (const FlagBlock& block : blocks_) {
    try {
      driver_->free_flags(block);
    } catch (const DriverError&) {   // the device is gone, and its memory with it
    }
  }
}

Flag Flags::add() {
  if (blocks_.empty() || used_ == blocks_.back().count) {
    blocks_.push_back(driver_->allocate_flags());
    used_ = 0;
  }
  const FlagBlock& block = blocks_.back();
  const std::size_t at = block.stride * static_cast<std::size_t>(used_++);
  auto* host = static_cast<std::byte*>(block.host) + at;
  return {new (host) Word(kIdle), static_cast<std::byte*>(block.device) + at};
}

}  // namespace ft::handshake
