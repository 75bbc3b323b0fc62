// Handshakes at work: what goes wrong in a job, in a stream, and at the end.
#include <atomic>
#include <latch>
#include <limits>

#include "handshake_support.h"

using namespace handshake_support;

namespace {

constexpr Mechanism kAll[] = {Mechanism::MemoryOperations, Mechanism::HostCallbacks,
                              Mechanism::StreamSynchronization};

std::unique_ptr<Handshake> made(Fake& fake, Mechanism mechanism, std::chrono::milliseconds limit = 20'000ms) {
  return make_handshake(mechanism, fake.driver, quick(limit), mechanism != Mechanism::StreamSynchronization);
}

// A job on one number of pinned memory.
struct Number {
  double in = 0, out = 0;
};

}  // namespace

TEST(a_job_that_throws_poisons_the_step_and_holds_nothing_up) {
  Fake fake(Vendor::Cuda);
  for (const Mechanism mechanism : kAll) {
    const auto handshake = made(fake, mechanism);
    Number number;
    bool throws = true;
    const int slot = handshake->add({.name = "layer 7, 2 tokens",
                                     .run =
                                         [&](Progress&) {
                                           number.out = number.in;
                                           if (throws) throw std::invalid_argument("ids: found 99");
                                         },
                                     .poison = [&] { number.out = std::numeric_limits<double>::quiet_NaN(); }});
    const Stream stream = fake.driver->create_stream();
    number.in = 1;
    handshake->submit(slot, stream);
    if (mechanism == Mechanism::StreamSynchronization) {
      CHECK_THROWS(handshake->wait(slot, stream), HandshakeError, "layer 7, 2 tokens: ids: found 99");
    } else {
      handshake->wait(slot, stream);
    }
    fake.driver->synchronize(stream);   // the stream was not held up
    CHECK(number.out != number.out);
    CHECK_THROWS(handshake->check(), HandshakeError, "layer 7, 2 tokens: ids: found 99");
    CHECK_THROWS(handshake->submit(slot, stream), HandshakeError, "its output was dropped");
    throws = false;
    handshake->clear();
    number.in = 2;
    handshake->submit(slot, stream);
    handshake->wait(slot, stream);
    fake.driver->synchronize(stream);
    handshake->check();
    CHECK_EQ(number.out, 2.0);
    CHECK(handshake->close());
    fake.driver->destroy_stream(stream);
  }
}

TEST(after_a_failure_the_rest_of_the_step_is_skipped) {
  Fake fake(Vendor::Rocm);
  const auto handshake = made(fake, Mechanism::MemoryOperations);
  std::atomic<int> ran{0}, poisoned{0};
  std::vector<int> slots;
  for (int i = 0; i < 5; ++i) {
    slots.push_back(handshake->add({.name = "layer",
                                    .run =
                                        [&, i](Progress&) {
                                          ++ran;
                                          if (i == 2) throw std::runtime_error("broken");
                                        },
                                    .poison = [&] { ++poisoned; }}));
  }
  const Stream stream = fake.driver->create_stream();
  fake.driver->begin_capture(stream);
  for (const int slot : slots) {
    handshake->submit(slot, stream);
    handshake->wait(slot, stream);
  }
  const Graph graph = fake.driver->end_capture(stream);
  const Executable executable = fake.driver->instantiate(graph);
  fake.driver->launch(executable, stream);
  fake.driver->synchronize(stream);
  CHECK_EQ(ran.load(), 3);
  CHECK_EQ(poisoned.load(), 3);
  CHECK_THROWS(handshake->check(), HandshakeError, "broken");
  fake.driver->destroy_graph(graph);
  fake.driver->destroy_executable(executable);
  CHECK(handshake->close());
  fake.driver->destroy_stream(stream);
}

// What a job that never ends may touch outlives the test.
struct Hang {
  std::atomic<bool> on{true};
  std::atomic<bool> ended{false};
};

TEST(a_job_that_hangs_is_an_error_and_holds_nothing_up) {
  for (const Mechanism mechanism : kAll) {
    Fake fake(Vendor::Cuda);
    static std::vector<std::unique_ptr<Hang>> hangs;
    hangs.push_back(std::make_unique<Hang>());
    Hang* hang = hangs.back().get();
    auto handshake = made(fake, mechanism, 300ms);
    const int stuck = handshake->add({.name = "layer 3", .run = [hang](Progress&) {
      while (hang->on) std::this_thread::sleep_for(1ms);
      hang->ended = true;
    }});
    const int next = handshake->add({.name = "layer 4", .run = [](Progress&) {}});
    const Stream stream = fake.driver->create_stream();
    handshake->submit(stuck, stream);
    if (mechanism == Mechanism::StreamSynchronization) {
      CHECK_THROWS(handshake->wait(stuck, stream), HandshakeError, "layer 3: no progress for 300 ms");
    } else {
      handshake->wait(stuck, stream);
      handshake->submit(next, stream);   // answered by the watchdog
      handshake->wait(next, stream);
      fake.driver->synchronize(stream);
    }
    CHECK_THROWS(handshake->check(), HandshakeError, "layer 3: no progress for 300 ms");
    CHECK_THROWS(handshake->clear(), HandshakeError, "no progress");   // there is no going on
    CHECK(!handshake->close());
    handshake.reset();
    fake.driver->destroy_stream(stream);
    hang->on = false;
    CHECK(soon([&] { return hang->ended.load(); }));
  }
}

TEST(a_job_that_advances_is_not_taken_for_stuck) {
  Fake fake(Vendor::Cuda);
  const auto handshake = made(fake, Mechanism::MemoryOperations, 400ms);
  const int slot = handshake->add({.name = "long", .run = [](Progress& progress) {
    for (int i = 0; i < 30; ++i) {
      std::this_thread::sleep_for(40ms);
      progress.advance();
    }
  }});
  const Stream stream = fake.driver->create_stream();
  handshake->submit(slot, stream);
  handshake->wait(slot, stream);
  fake.driver->synchronize(stream);
  handshake->check();
  CHECK(handshake->close());
  fake.driver->destroy_stream(stream);
}

TEST(a_ready_that_never_comes_is_an_error_and_the_stream_goes_on) {
  Fake fake(Vendor::Cuda);
  const auto handshake = made(fake, Mechanism::MemoryOperations, 300ms);
  const int slot = handshake->add({.name = "layer", .run = [](Progress&) {}});
  const Stream stream = fake.driver->create_stream();
  // The wait is on the stream, but the write that should come before it never happens.
  handshake->announce(1);
  handshake->wait(slot, stream);
  fake.driver->synchronize(stream);
  CHECK_THROWS(handshake->check(), HandshakeError, "the GPU has not asked for the CPU's work for 300 ms, though 1");
  handshake->clear();
  handshake->submit(slot, stream);
  handshake->wait(slot, stream);
  fake.driver->synchronize(stream);
  handshake->check();
  CHECK(handshake->close());
  fake.driver->destroy_stream(stream);
}

TEST(idle_time_is_no_failure_and_the_next_step_is_answered) {
  Fake fake(Vendor::Cuda);
  const auto handshake = made(fake, Mechanism::MemoryOperations, 100ms);
  Step step(fake, *handshake, 3);
  step.set_inputs(1);
  step.enqueue();
  fake.driver->synchronize(step.stream);
  std::this_thread::sleep_for(1200ms);   // into the long naps
  handshake->check();
  step.set_inputs(2);
  step.capture();
  step.replay();   // not announced
  fake.driver->synchronize(step.stream);
  CHECK(step.correct());
  handshake->check();
  CHECK(handshake->close());
}

TEST(shutdown_waits_for_work_in_flight) {
  for (const Mechanism mechanism : {Mechanism::MemoryOperations, Mechanism::HostCallbacks}) {
    Fake fake(Vendor::Cuda);
    auto handshake = made(fake, mechanism);
    Step step(fake, *handshake, 200);
    step.set_inputs(9);
    step.enqueue();
    CHECK(handshake->close());
    fake.driver->synchronize(step.stream);
    CHECK(step.correct());
    CHECK_THROWS(handshake->submit(0, step.stream), HandshakeError, "closed");
    CHECK_THROWS(handshake->add({.name = "late", .run = [](Progress&) {}}), HandshakeError, "closed");
    CHECK(handshake->close());   // and again
    handshake.reset();
  }
}

TEST(shutdown_waits_for_a_replay_that_nobody_announced) {
  Fake fake(Vendor::Rocm);
  auto handshake = made(fake, Mechanism::MemoryOperations);
  Step step(fake, *handshake, 200);
  step.set_inputs(4);
  step.capture();
  step.replay();
  CHECK(handshake->close());
  CHECK(step.correct());   // closing has waited for the stream
  handshake->check();
}

TEST(shutdown_after_the_device_is_gone) {
  Fake fake(Vendor::Cuda);
  const auto handshake = made(fake, Mechanism::MemoryOperations);
  Step step(fake, *handshake, 50);
  step.set_inputs(1);
  step.enqueue();
  fake.set(fake::kDeviceReset);
  CHECK_THROWS(handshake->submit(0, step.stream), DriverError, "the device was reset");
  CHECK(handshake->close());
  CHECK_THROWS(handshake->check(), HandshakeError, "the GPU driver failed");
}

TEST(many_slots) {
  Fake fake(Vendor::Cuda);
  const auto handshake = made(fake, Mechanism::MemoryOperations);
  std::vector<std::unique_ptr<Step>> steps;
  for (int i = 0; i < 10; ++i) steps.push_back(std::make_unique<Step>(fake, *handshake, 61));
  for (std::size_t i = 0; i < 30; ++i) {
    Step& step = *steps[i * 7 % 10];
    step.set_inputs(i);
    step.enqueue();
    fake.driver->synchronize(step.stream);
    CHECK(step.correct());
  }
  CHECK_EQ(handshake->coordinator().slots(), 610);
  CHECK(handshake->close());
  CHECK_THROWS(handshake->wait(610, steps[0]->stream), HandshakeError, "closed");
}

TEST(slots_that_do_not_exist) {
  Fake fake(Vendor::Rocm);
  const auto handshake = made(fake, Mechanism::MemoryOperations);
  handshake->add({.name = "only", .run = [](Progress&) {}});
  CHECK_THROWS(handshake->submit(1, nullptr), HandshakeError, "found slot 1, expected 0 to 0");
  CHECK_THROWS(handshake->wait(-1, nullptr), HandshakeError, "found slot -1");
}

TEST(two_streams_at_once) {
  for (const Vendor vendor : {Vendor::Cuda, Vendor::Rocm}) {
    Fake fake(vendor);
    const auto handshake = made(fake, Mechanism::MemoryOperations);
    Step one(fake, *handshake, 7), other(fake, *handshake, 11);
    one.set_inputs(0);
    one.capture();
    other.set_inputs(0);
    other.capture();
    for (std::uint64_t i = 1; i <= 300; ++i) {
      one.set_inputs(i);
      other.set_inputs(i + 5000);
      one.replay();
      other.replay();
      fake.driver->synchronize(one.stream);
      fake.driver->synchronize(other.stream);
      CHECK(one.correct() && other.correct());
    }
    handshake->check();
    CHECK(handshake->close());
  }
}

TEST(replays_one_behind_the_other) {
  for (const Mechanism mechanism : {Mechanism::MemoryOperations, Mechanism::HostCallbacks}) {
    Fake fake(Vendor::Cuda);
    const auto handshake = made(fake, mechanism);
    Step step(fake, *handshake, 4);
    step.set_inputs(3);
    step.capture();
    for (int i = 0; i < 50; ++i) step.replay();
    fake.driver->synchronize(step.stream);
    CHECK(step.correct());
    CHECK_EQ(handshake->coordinator().completed(), std::uint64_t{200});
    CHECK(handshake->close());
  }
}

TEST(what_cannot_be_captured_says_so) {
  Fake fake(Vendor::Cuda);
  const auto sync = made(fake, Mechanism::StreamSynchronization);
  const auto eager_only = make_handshake(Mechanism::MemoryOperations, fake.driver, quick(), false);
  CHECK(!sync->capturable() && !eager_only->capturable());
  for (Handshake* handshake : {sync.get(), eager_only.get()}) {
    const int slot = handshake->add({.name = "layer", .run = [](Progress&) {}});
    const Stream stream = fake.driver->create_stream();
    fake.driver->begin_capture(stream);
    CHECK_THROWS(handshake->submit(slot, stream), HandshakeError, "cannot be captured into a graph here");
    fake.driver->destroy_graph(fake.driver->end_capture(stream));
    fake.driver->destroy_stream(stream);
  }
}

TEST(a_wait_without_its_submit_does_not_hang_the_caller) {
  Fake fake(Vendor::Cuda);
  const auto handshake = made(fake, Mechanism::StreamSynchronization);
  const int slot = handshake->add({.name = "layer", .run = [](Progress&) {}});
  CHECK_THROWS(handshake->wait(slot, nullptr), HandshakeError, "expected its submit first");
  handshake->submit(slot, nullptr);
  handshake->wait(slot, nullptr);
  CHECK(handshake->close());
}

TEST(the_coordinators_seat) {
  const std::vector<int> cores{0, 2, 4, 6}, logical{0, 1, 2, 3, 4, 5, 6, 7};
  const auto seat = [&](std::vector<int> workers, const std::vector<int>& allowed) {
    return plan_seat(workers, cores, allowed);
  };
  // A core that is free, for it alone.
  CHECK_EQ(seat({0, 2, 4}, logical).cpu, 6);
  CHECK(seat({0, 2, 4}, cores).spin);
  // All are taken: that of the worker whose part it takes; spinning only where others have room.
  CHECK_EQ(seat({0, 2, 4, 6}, logical).cpu, 0);
  CHECK(seat({0, 2, 4, 6}, logical).spin);
  CHECK(!seat({0, 2, 4, 6}, cores).spin);
  // Workers that are not pinned: nor is it.
  CHECK_EQ(seat({-1, -1}, logical).cpu, -1);
}

FT_TEST_MAIN
