#include "handshake/handshake.h"

#include <utility>

namespace ft::handshake {

Handshake::Handshake(std::shared_ptr<Driver> driver, const CoordinatorOptions& options, bool capturable)
    : driver_(std::move(driver)),
      capturable_(capturable),
      storage_(std::make_shared<Storage>(driver_)),
      coordinator_(std::make_unique<Coordinator>(options)) {}

Handshake::~Handshake() {
  close();
  if (!whole_) keep_for_ever(storage_);
}

int Handshake::add(Job job) {
  const std::lock_guard lock(mutex_);
  driver_->make_current();
  Flag flag = make_flag(*storage_);
  const int index = coordinator_->add(flag.word, std::move(job));
  storage_->slots.push_back(flag);
  return index;
}

Flag Handshake::slot(int index) {
  const std::lock_guard lock(mutex_);
  if (closed_) throw HandshakeError("this handshake is closed; make a new one");
  if (index < 0 || index >= static_cast<int>(storage_->slots.size())) {
    throw HandshakeError("found slot " + std::to_string(index) + ", expected 0 to " +
                         std::to_string(static_cast<int>(storage_->slots.size()) - 1));
  }
  return storage_->slots[static_cast<std::size_t>(index)];
}

void Handshake::submit(int index, Stream stream) {
  const Flag flag = slot(index);
  check();
  driver_->make_current();
  const bool captured = driver_->capturing(stream);
  if (captured && !capturable_) {
    throw HandshakeError(name() + " cannot be captured into a graph here; run this step eagerly");
  }
  if (captured) return signal(flag, stream);
  coordinator_->expect(1);
  try {
    signal(flag, stream);
  } catch (...) {
    coordinator_->expect(-1);
    throw;
  }
}

void Handshake::wait(int index, Stream stream) {
  const Flag flag = slot(index);
  driver_->make_current();
  await(flag, stream);
}

bool Handshake::close() {
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return whole_;
    closed_ = true;
  }
  try {
    driver_->make_current();
    driver_->synchronize_all();   // the coordinator still answers
  } catch (const DriverError&) {  // a device that is gone asks for nothing more
    coordinator_->fail("the GPU driver failed while the handshake was closed");
  }
  whole_ = coordinator_->close();
  return whole_;
}

}  // namespace ft::handshake
