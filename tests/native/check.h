// A tiny test harness. TEST(name) { CHECK(...); } registers a case; FT_TEST_MAIN runs all of them
// and fails if one failed or if there was none.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace check {

struct Case {
  const char* name;
  void (*body)();
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

struct Register {
  Register(const char* name, void (*body)()) { cases().push_back({name, body}); }
};

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  throw Failure(std::string(file) + ":" + std::to_string(line) + ": " + what);
}

template <class A, class B>
void equal(const A& a, const B& b, const char* text, const char* file, int line) {
  if (a == b) return;
  std::ostringstream out;
  out << text << ": " << a << " != " << b;
  fail(file, line, out.str());
}

inline void near(double a, double b, double tolerance, const char* text, const char* file, int line) {
  if (std::abs(a - b) <= tolerance) return;   // false for NaN
  std::ostringstream out;
  out.precision(9);
  out << text << ": " << a << " and " << b << " differ by more than " << tolerance;
  fail(file, line, out.str());
}

// Without arguments every test; with arguments those whose name contains one of them.
inline bool asked_for(const char* name, int argc, char** argv) {
  if (argc < 2) return true;
  for (int i = 1; i < argc; ++i) {
    if (std::strstr(name, argv[i]) != nullptr) return true;
  }
  return false;
}

inline int run_all(int argc, char** argv) {
  int failed = 0;
  int run = 0;
  for (const Case& test : cases()) {
    if (!asked_for(test.name, argc, argv)) continue;
    ++run;
    try {
      test.body();
      std::printf("ok    %s\n", test.name);
    } catch (const std::exception& error) {
      ++failed;
      std::printf("FAIL  %s\n      %s\n", test.name, error.what());
    }
    std::fflush(stdout);
  }
  std::printf("%d tests, %d failed\n", run, failed);
  return failed != 0 || run == 0 ? 1 : 0;
}

}  // namespace check

#define TEST(name)                                              \
  static void test_##name();                                    \
  static const check::Register register_##name{#name, test_##name}; \
  static void test_##name()
#define CHECK(condition) \
  do { if (!(condition)) check::fail(__FILE__, __LINE__, "not true: " #condition); } while (0)
#define CHECK_EQ(a, b) check::equal((a), (b), #a " == " #b, __FILE__, __LINE__)
#define CHECK_NEAR(a, b, tolerance) check::near((a), (b), (tolerance), #a " ~ " #b, __FILE__, __LINE__)
// The expression must throw `type`, with a message that contains `part`.
#define CHECK_THROWS(expression, type, part)                                                 \
  do {                                                                                       \
    bool thrown = false;                                                                     \
    try {                                                                                    \
      (void)(expression);                                                                    \
    } catch (const type& error) {                                                            \
      thrown = true;                                                                         \
      if (std::string(error.what()).find(part) == std::string::npos)                         \
        check::fail(__FILE__, __LINE__, std::string("message lacks '") + (part) + "': " + error.what()); \
    }                                                                                        \
    if (!thrown) check::fail(__FILE__, __LINE__, "did not throw " #type ": " #expression);   \
  } while (0)
#define FT_TEST_MAIN \
  int main(int argc, char** argv) { return check::run_all(argc, argv); }
