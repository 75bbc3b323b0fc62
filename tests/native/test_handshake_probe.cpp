// The probe refuses what does not work, says why, and the next mechanism computes the right thing.
#include <cstdlib>
#include <filesystem>

#include "handshake_support.h"

using namespace handshake_support;

namespace {

// A thousand replays, or eager steps, with other inputs each, by whatever `choose` gives.
void serve_correctly(Fake& fake, const Choice& choice, int steps) {
  const auto handshake = make_handshake(choice.mechanism, fake.driver, quick(), choice.capturable);
  Step step(fake, *handshake, 5);
  step.set_inputs(0);
  step.enqueue();
  fake.driver->synchronize(step.stream);
  CHECK(step.correct());
  if (choice.capturable) step.capture();
  for (int i = 1; i <= steps; ++i) {
    step.set_inputs(static_cast<std::uint64_t>(i));
    if (choice.capturable) {
      handshake->announce(5);
      step.replay();
    } else {
      step.enqueue();
    }
    fake.driver->synchronize(step.stream);
    handshake->check();
    CHECK(step.correct());
  }
  CHECK(handshake->close());
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// With this fault the best mechanism is refused, for a reason that contains `reason`.
Choice refuses_first(Fake& fake, const std::string& reason, bool eager_works = false) {
  Choice choice = choose(fake.driver);
  const Finding& first = choice.findings.front();
  CHECK(first.mechanism == Mechanism::MemoryOperations && !first.graph);
  CHECK_EQ(first.eager, eager_works);
  if (!contains(first.reason, reason)) throw check::Failure("reason: " + first.reason + "; expected: " + reason);
  return choice;
}

struct Wrong {
  Vendor vendor;
  int fault;
  const char* reason;
  bool eager;   // whether memory operations still work on a stream
};

// Refused in graphs: CUDA goes on with callbacks, ROCm without graphs.
void goes_on(const Wrong& wrong) {
  Fake fake(wrong.vendor, wrong.fault);
  const Choice choice = refuses_first(fake, wrong.reason, wrong.eager);
  const bool cuda = wrong.vendor == Vendor::Cuda;
  const bool copies_wrong = (wrong.fault & (fake::kStaleAfter200 | fake::kIgnoresChangedMemory)) != 0;
  CHECK_EQ(choice.capturable, cuda && !copies_wrong);
  if (choice.capturable) {
    CHECK(choice.mechanism == Mechanism::HostCallbacks);
  } else {
    CHECK(choice.mechanism == (wrong.eager ? Mechanism::MemoryOperations : Mechanism::StreamSynchronization));
  }
  serve_correctly(fake, choice, 1000);
}

}  // namespace

TEST(a_sound_driver_passes_with_memory_operations) {
  for (const Vendor vendor : {Vendor::Cuda, Vendor::Rocm}) {
    Fake fake(vendor);
    const Choice choice = choose(fake.driver);
    if (!choice.capturable) throw check::Failure(choice.findings.front().reason);
    CHECK(choice.mechanism == Mechanism::MemoryOperations);
    CHECK_EQ(choice.findings.size(), std::size_t{1});
    CHECK(choice.findings[0].eager && choice.findings[0].reason.empty());
    serve_correctly(fake, choice, 1000);
  }
}

TEST(every_mechanism_of_a_sound_driver_computes_the_right_thing) {
  Fake fake(Vendor::Cuda);
  for (const Mechanism mechanism : {Mechanism::HostCallbacks, Mechanism::StreamSynchronization}) {
    const Finding finding = probe(fake.driver, mechanism);
    CHECK(finding.eager);
    CHECK_EQ(finding.graph, mechanism == Mechanism::HostCallbacks);
    serve_correctly(fake, {mechanism, finding.graph, {}}, 1000);
  }
}

TEST(operations_that_the_driver_denies) {
  goes_on({Vendor::Cuda, fake::kUnsupported, "attribute 122 is 0", false});
  goes_on({Vendor::Rocm, fake::kUnsupported, "hipDeviceAttributeCanUseStreamWaitValue is 0", false});
}

TEST(operations_that_fail_name_the_call_and_the_error) {
  goes_on({Vendor::Cuda, fake::kOperationFails, "cuStreamWriteValue64 failed: FAKE_NOT_SUPPORTED", false});
  goes_on({Vendor::Rocm, fake::kOperationFails, "hipStreamWriteValue64 failed: FAKE_NOT_SUPPORTED", false});
}

TEST(operations_that_run_at_capture) {
  goes_on({Vendor::Cuda, fake::kRunsAtCapture, "instead of recording", true});
  goes_on({Vendor::Rocm, fake::kRunsAtCapture, "instead of recording", true});
}

TEST(a_lost_write_is_given_up_in_time) {
  for (const Vendor vendor : {Vendor::Cuda, Vendor::Rocm}) {
    Fake fake(vendor, fake::kWriteLost);
    ProbeOptions impatient;
    impatient.time_limit = 1500ms;
    const auto start = std::chrono::steady_clock::now();
    const Finding finding = probe(fake.driver, Mechanism::MemoryOperations, impatient);
    CHECK(!finding.graph);
    CHECK(contains(finding.reason, "a write or a wait was lost"));
    CHECK(std::chrono::steady_clock::now() - start < 15s);
  }
}

TEST(a_device_that_hangs_is_let_be) {
  for (const Vendor vendor : {Vendor::Cuda, Vendor::Rocm}) {
    Fake fake(vendor, fake::kWaitNeverEnds);
    ProbeOptions impatient;
    impatient.time_limit = 300ms;
    const auto start = std::chrono::steady_clock::now();
    const Finding finding = probe(fake.driver, Mechanism::MemoryOperations, impatient);
    CHECK(finding.hung && !finding.eager && !finding.graph);
    CHECK(contains(finding.reason, "even when every wait had been ended"));
    // Had it gone on to the next mechanism, closing that would wait for the device for ever.
    CHECK_THROWS(choose(fake.driver, impatient), DriverError, "start again with --device cpu");
    CHECK(std::chrono::steady_clock::now() - start < 15s);
  }
}

#ifndef __SANITIZE_THREAD__   // which finds the data race that this is
TEST(waits_that_do_not_wait) {
  for (const Vendor vendor : {Vendor::Cuda, Vendor::Rocm}) {
    Fake fake(vendor, fake::kWaitPasses);
    const Choice choice = refuses_first(fake, "an eager step");
    serve_correctly(fake, choice, 1000);
  }
}
#endif

TEST(long_graphs_with_stale_addresses) {
  goes_on({Vendor::Cuda, fake::kStaleAfter200, "from a wrong address", true});
  goes_on({Vendor::Rocm, fake::kStaleAfter200, "from a wrong address", true});
  Fake fake(Vendor::Rocm, fake::kStaleAfter200);
  ProbeOptions brief;
  brief.layers = 20;   // 140 nodes: why the probe's graph is long
  CHECK(probe(fake.driver, Mechanism::MemoryOperations, brief).graph);
}

TEST(replays_that_ignore_changed_memory) {
  goes_on({Vendor::Cuda, fake::kIgnoresChangedMemory, "held at an earlier step", true});
  goes_on({Vendor::Rocm, fake::kIgnoresChangedMemory, "held at an earlier step", true});
}

TEST(parameters_that_a_graph_does_not_copy_are_kept) {
  Fake fake(Vendor::Rocm, fake::kShallowParameters);
  const Choice choice = choose(fake.driver);
  CHECK(choice.capturable && choice.mechanism == Mechanism::MemoryOperations);
  serve_correctly(fake, choice, 1000);
}

TEST(callbacks_that_never_run) {
  Fake fake(Vendor::Cuda, fake::kUnsupported | fake::kCallbackNeverRuns);
  const Choice choice = choose(fake.driver);
  CHECK_EQ(choice.findings.size(), std::size_t{3});
  CHECK(contains(choice.findings[1].reason, "the CPU was asked 0 times"));
  CHECK(choice.mechanism == Mechanism::StreamSynchronization && !choice.capturable);
  CHECK(contains(choice.findings[2].reason, "a graph cannot stop for its caller"));
  serve_correctly(fake, choice, 1000);
}

TEST(callbacks_that_cannot_be_put_on_a_stream) {
  Fake fake(Vendor::Cuda, fake::kUnsupported | fake::kCallbackFails);
  const Choice choice = choose(fake.driver);
  CHECK(contains(choice.findings[1].reason, "cuLaunchHostFunc failed: FAKE_NOT_SUPPORTED"));
  CHECK(choice.mechanism == Mechanism::StreamSynchronization);
}

TEST(a_device_that_is_gone_is_an_error_that_says_so) {
  for (const Vendor vendor : {Vendor::Cuda, Vendor::Rocm}) {
    Fake fake(vendor);
    fake.set(fake::kDeviceReset);
    CHECK_THROWS(choose(fake.driver), DriverError, "FAKE_CONTEXT_IS_DESTROYED (the device was reset)");
    CHECK_THROWS(choose(fake.driver), DriverError, "use --device cpu");
  }
}

TEST(a_driver_that_is_not_there) {
  CHECK_THROWS(Driver::open(Vendor::Cuda, "/nowhere/libcuda.so.1"), DriverError, "/nowhere/libcuda.so.1");
  // HIP's library is no CUDA driver.
  CHECK_THROWS(Driver::open(Vendor::Cuda, FT_FAKE_HIP), DriverError, "has no cuInit");
}

// Two copies of a driver's library would not know each other's streams.
TEST(a_library_that_is_loaded_already_is_the_one_that_is_used) {
  char pattern[] = "/tmp/ft_handshake_XXXXXX";
  const std::filesystem::path directory = mkdtemp(pattern);
  const std::string copy = directory / "libamdhip64.so.7";
  std::filesystem::copy_file(FT_FAKE_HIP, copy);
  void* handle = dlopen(copy.c_str(), RTLD_NOW);
  std::filesystem::remove_all(directory);   // so it cannot be opened once more
  CHECK(handle != nullptr);
  const auto driver = Driver::open(Vendor::Rocm);
  reinterpret_cast<void (*)(int)>(dlsym(handle, "fake_set_fault"))(fake::kUnsupported);
  CHECK(contains(driver->no_memory_operations(), "hipDeviceAttributeCanUseStreamWaitValue is 0"));
}

FT_TEST_MAIN
