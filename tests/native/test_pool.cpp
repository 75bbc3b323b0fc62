#include "core/pool.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <numeric>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"

using namespace std::chrono_literals;

namespace {

std::vector<int> unpinned(int threads) { return std::vector<int>(static_cast<std::size_t>(threads), -1); }

template <class Body>
class Function final : public ft::Task {
 public:
  explicit Function(Body body) : body_(std::move(body)) {}
  void run(ft::Lane& lane) override { body_(lane); }

 private:
  Body body_;
};

template <class Body>
std::shared_ptr<ft::Task> task(Body body) {
  return std::make_shared<Function<Body>>(std::move(body));
}

// Sums 0..tiles-1 by tiles, then lets every lane check the total: what the barrier is for.
class SumTask final : public ft::Task {
 public:
  explicit SumTask(std::int64_t tiles) : tiles_(tiles) {}
  void run(ft::Lane& lane) override {
    for (int round = 0; round < 2; ++round) {
      for (std::int64_t tile = tiles_ * round; (tile = counter_[round].take()) < tiles_;) sum_[round] += tile;
      lane.barrier();
      if (sum_[round] == tiles_ * (tiles_ - 1) / 2) ++agreed_;
      lane.barrier();
    }
  }
  int agreed() const { return agreed_; }

 private:
  const std::int64_t tiles_;
  ft::TileCounter counter_[2];
  std::atomic<std::int64_t> sum_[2]{};
  std::atomic<int> agreed_{0};
};

// Hands out tiles team by team, and says which lane did which in which order.
class TeamTiles final : public ft::Task {
 public:
  TeamTiles(std::span<const ft::Team> teams, std::vector<std::int64_t> tiles)
      : teams_(teams), tiles_(std::move(tiles)), next_(teams.size()),
        done(static_cast<std::size_t>(teams.back().first + teams.back().lanes)) {}

  // A lane does its first tile when every lane has one. The lane `held` does it after all others.
  void run(ft::Lane& lane) override {
    auto& mine = done[static_cast<std::size_t>(lane.index())];
    ft::own_team_first(teams_, lane.index(), [&](std::size_t team) {
      for (std::int64_t tile; (tile = next_[team].take()) < tiles_[team];) {
        if (mine.empty()) {
          ++started_;
          wait_for([&] { return started_ == lane.count(); });
          if (lane.index() == held) wait_for([&] { return finished_ + 1 == total(); });
        }
        mine.emplace_back(team, tile);
        ++finished_;
      }
    });
  }

  std::int64_t total() const { return std::accumulate(tiles_.begin(), tiles_.end(), std::int64_t{0}); }

 private:
  template <class Condition>
  static void wait_for(Condition met) {   // not for ever: the test is to fail, not to hang
    const auto end = std::chrono::steady_clock::now() + 20s;
    while (!met() && std::chrono::steady_clock::now() < end) std::this_thread::yield();
  }

  const std::span<const ft::Team> teams_;
  const std::vector<std::int64_t> tiles_;
  std::vector<ft::TileCounter> next_;
  std::atomic<std::int64_t> started_{0}, finished_{0};

 public:
  int held = -1;
  std::vector<std::vector<std::pair<std::size_t, std::int64_t>>> done;   // by lane
};

}  // namespace

TEST(run_gives_every_lane_once) {
  for (int threads : {1, 2, 3, 7}) {
    ft::ThreadPool pool(unpinned(threads));
    CHECK_EQ(pool.size(), threads);
    std::vector<std::atomic<int>> calls(static_cast<std::size_t>(threads));
    auto count = task([&](ft::Lane& lane) {
      calls[static_cast<std::size_t>(lane.index())] += lane.count() == threads ? 1 : 1000;
    });
    for (int i = 0; i < 200; ++i) pool.run(*count);
    for (const auto& n : calls) CHECK_EQ(n.load(), 200);
  }
}

TEST(caller_is_lane_zero_of_run) {
  ft::ThreadPool pool(unpinned(3));
  std::thread::id lane0;
  auto who = task([&](ft::Lane& lane) {
    if (lane.index() == 0) lane0 = std::this_thread::get_id();
  });
  pool.run(*who);
  CHECK(lane0 == std::this_thread::get_id());
}

TEST(barriers_separate_phases_over_thousands_of_tasks) {
  ft::ThreadPool pool(unpinned(3));
  for (int i = 0; i < 3000; ++i) {
    SumTask sum(17);
    pool.run(sum);
    CHECK_EQ(sum.agreed(), 6);
  }
}

TEST(submit_runs_without_the_caller) {
  ft::ThreadPool pool(unpinned(2));
  std::atomic<int> lanes{0};
  std::atomic<bool> on_caller{false};
  const auto caller = std::this_thread::get_id();
  auto ticket = pool.submit(task([&](ft::Lane& lane) {
    if (std::this_thread::get_id() == caller) on_caller = true;
    lane.barrier();
    ++lanes;
  }));
  while (!ft::ThreadPool::done(*ticket)) std::this_thread::sleep_for(1ms);
  CHECK_EQ(lanes.load(), 2);
  CHECK(!on_caller);
  pool.wait(*ticket);
  pool.wait(*ticket);   // waiting again is harmless
}

TEST(wait_claims_lane_zero_that_has_not_started) {
  ft::ThreadPool pool(unpinned(2));
  std::atomic<bool> release{false};
  auto blocker = pool.submit(task([&](ft::Lane& lane) {
    if (lane.index() == 0) release.wait(false);
  }));
  std::this_thread::sleep_for(20ms);   // thread 0 is now inside the blocker
  std::thread::id lane0;
  auto second = pool.submit(task([&](ft::Lane& lane) {
    if (lane.index() == 0) lane0 = std::this_thread::get_id();
    lane.barrier();
  }));
  pool.wait(*second);
  CHECK(lane0 == std::this_thread::get_id());
  release = true;
  release.notify_all();
  pool.wait(*blocker);
}

TEST(thread_zero_takes_tasks_in_the_order_of_submission) {
  ft::ThreadPool pool(unpinned(2));
  std::vector<int> order[2];   // one per lane, each written by one thread
  std::shared_ptr<ft::ThreadPool::Ticket> last;
  for (int i = 0; i < 500; ++i) {
    last = pool.submit(task([&order, i](ft::Lane& lane) { order[lane.index()].push_back(i); }));
  }
  while (!ft::ThreadPool::done(*last)) std::this_thread::sleep_for(1ms);
  for (const auto& lane : order) {
    CHECK_EQ(lane.size(), 500u);
    for (int i = 0; i < 500; ++i) CHECK_EQ(lane[static_cast<std::size_t>(i)], i);
  }
}

TEST(many_threads_run_submit_and_wait_at_once) {
  ft::ThreadPool pool(unpinned(3));
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&pool, &wrong, caller] {
      for (int i = 0; i < 300; ++i) {
        auto submitted = std::make_shared<SumTask>(5 + i % 7);
        auto ticket = pool.submit(submitted);
        if ((i + caller) % 2 == 0) {
          SumTask direct(9);
          pool.run(direct);
          wrong += direct.agreed() != 6;
        }
        pool.wait(*ticket);
        wrong += submitted->agreed() != 6;
      }
    });
  }
  for (std::thread& thread : callers) thread.join();
  CHECK_EQ(wrong.load(), 0);
}

TEST(tickets_may_be_waited_for_in_any_order) {
  ft::ThreadPool pool(unpinned(2));
  std::vector<std::shared_ptr<SumTask>> tasks;
  std::vector<std::shared_ptr<ft::ThreadPool::Ticket>> tickets;
  for (int i = 0; i < 100; ++i) {
    tasks.push_back(std::make_shared<SumTask>(11));
    tickets.push_back(pool.submit(tasks.back()));
  }
  for (std::size_t i = tickets.size(); i-- > 0;) pool.wait(*tickets[i]);
  for (const auto& each : tasks) CHECK_EQ(each->agreed(), 4);
}

TEST(a_throwing_lane_is_rethrown_and_no_barrier_hangs) {
  for (int threads : {1, 2, 3}) {
    ft::ThreadPool pool(unpinned(threads));
    for (int thrower = 0; thrower < threads; ++thrower) {
      std::atomic<int> passed{0};
      auto body = [&passed, thrower](ft::Lane& lane) {
        if (lane.index() == thrower) throw std::runtime_error("lane " + std::to_string(thrower));
        lane.barrier();
        ++passed;
        lane.barrier();
      };
      const std::string expected = "lane " + std::to_string(thrower);
      for (int i = 0; i < 50; ++i) {
        auto failing = task(body);
        CHECK_THROWS(pool.run(*failing), std::runtime_error, expected);
        auto ticket = pool.submit(failing);
        CHECK_THROWS(pool.wait(*ticket), std::runtime_error, expected);
        CHECK_THROWS(pool.wait(*ticket), std::runtime_error, expected);
      }
      CHECK_EQ(passed.load(), 0);   // nobody works on after a barrier that failed
      SumTask sum(13);   // and the pool still works
      pool.run(sum);
      CHECK_EQ(sum.agreed(), 2 * threads);
    }
  }
}

TEST(destruction_finishes_what_was_submitted) {
  std::atomic<int> lanes{0};
  std::shared_ptr<ft::ThreadPool::Ticket> last;
  {
    ft::ThreadPool pool(unpinned(3));
    for (int i = 0; i < 200; ++i) {
      last = pool.submit(task([&](ft::Lane& lane) {
        lane.barrier();
        ++lanes;
      }));
    }
  }
  CHECK_EQ(lanes.load(), 600);
  CHECK(ft::ThreadPool::done(*last));
}

TEST(a_task_lives_until_it_has_finished_and_no_longer) {
  ft::ThreadPool pool(unpinned(2));
  auto token = std::make_shared<int>(7);
  std::weak_ptr<int> watch = token;
  auto ticket = pool.submit(task([token](ft::Lane& lane) {
    std::this_thread::sleep_for(2ms);
    if (*token != 7) throw std::logic_error("gone");
    lane.barrier();
  }));
  token.reset();
  pool.wait(*ticket);
  CHECK(watch.expired());
}

TEST(a_completed_ticket_needs_no_thread) {
  ft::ThreadPool pool(unpinned(2));
  auto ticket = ft::ThreadPool::completed();
  CHECK(ft::ThreadPool::done(*ticket));
  pool.wait(*ticket);
}

TEST(pools_come_and_go) {
  for (int i = 0; i < 100; ++i) {
    ft::ThreadPool pool(unpinned(1 + i % 3));
    if (i % 2 == 0) {
      SumTask sum(3);
      pool.run(sum);
      CHECK_EQ(sum.agreed(), 2 * pool.size());
    }
  }
}

TEST(refuses_nonsense) {
  CHECK_THROWS(ft::ThreadPool(std::vector<int>{}), std::invalid_argument, "at least one thread");
  ft::ThreadPool pool(unpinned(1));
  CHECK_THROWS(pool.submit(nullptr), std::invalid_argument, "needs a task");
}

TEST(threads_of_a_node_are_a_team) {
  ft::ThreadPool one(unpinned(3));
  CHECK_EQ(one.teams().size(), 1u);
  CHECK_EQ(one.teams()[0].lanes, 3);
  ft::ThreadPool pool(std::vector<ft::Place>{{-1, 0}, {-1, 2}, {-1, 2}, {-1, 2}, {-1, 5}});
  const ft::Team expected[] = {{0, 0, 1}, {2, 1, 3}, {5, 4, 1}};
  CHECK_EQ(pool.teams().size(), std::size(expected));
  for (std::size_t i = 0; i < std::size(expected); ++i) {
    CHECK_EQ(pool.teams()[i].node, expected[i].node);
    CHECK_EQ(pool.teams()[i].first, expected[i].first);
    CHECK_EQ(pool.teams()[i].lanes, expected[i].lanes);
  }
  const std::size_t team_of_lane[] = {0, 1, 1, 1, 2};
  for (int lane = 0; lane < 5; ++lane) CHECK_EQ(ft::team_of(pool.teams(), lane), team_of_lane[lane]);
}

TEST(slices_cover_all_rows_in_proportion_to_the_lanes) {
  const std::vector<ft::Team> splits[] = {{{0, 0, 4}}, {{0, 0, 1}, {1, 1, 1}}, {{0, 0, 3}, {4, 3, 1}, {7, 4, 7}}};
  for (const auto& teams : splits) {
    const double lanes = teams.back().first + teams.back().lanes;
    for (const std::int64_t unit : {1, 16, 128}) {
      for (const std::int64_t rows : {0, 1, 31, 128, 768, 1000, 5001}) {
        std::int64_t at = 0;
        for (std::size_t team = 0; team < teams.size(); ++team) {
          const ft::Rows slice = ft::slice_of(teams, team, rows, unit);
          CHECK_EQ(slice.begin, at);
          CHECK(slice.end == rows || slice.end % unit == 0);
          CHECK_NEAR(slice.end - slice.begin, rows * teams[team].lanes / lanes, unit);
          at = slice.end;
        }
        CHECK_EQ(at, rows);
      }
    }
  }
  CHECK_EQ(ft::slice_of(splits[2], 0, 1100, 10).end, 300);
  CHECK_EQ(ft::slice_of(splits[2], 1, 1100, 10).end, 400);
}

TEST(a_lane_takes_its_own_teams_tiles_before_it_helps_and_every_tile_is_taken_once) {
  const std::vector<ft::Place> splits[] = {{{-1, 0}, {-1, 0}, {-1, 0}},
                                           {{-1, 0}, {-1, 1}},
                                           {{-1, 0}, {-1, 0}, {-1, 0}, {-1, 1}},
                                           {{-1, 0}, {-1, 3}, {-1, 3}, {-1, 4}}};
  for (const auto& places : splits) {
    ft::ThreadPool pool(places);
    for (int held = -1; held < pool.size(); ++held) {
      std::vector<std::int64_t> tiles;
      for (const ft::Team& team : pool.teams()) tiles.push_back(team.lanes + 7 * team.node);
      TeamTiles task(pool.teams(), tiles);
      task.held = held;
      pool.run(task);
      std::set<std::pair<std::size_t, std::int64_t>> seen;
      for (int lane = 0; lane < pool.size(); ++lane) {
        const std::size_t own = ft::team_of(pool.teams(), lane);
        const auto& done = task.done[static_cast<std::size_t>(lane)];
        CHECK(!done.empty() && done.front().first == own);
        bool helps = false;
        for (const auto& tile : done) {
          CHECK(seen.insert(tile).second);
          helps = helps || tile.first != own;
          CHECK(!helps || tile.first != own);
        }
        if (lane == held) CHECK_EQ(done.size(), 1u);   // the others have done all the rest
      }
      CHECK_EQ(static_cast<std::int64_t>(seen.size()), task.total());
    }
  }
}

TEST(runs_unpinned_where_pinning_fails) {
  const std::vector<int> no_such_cpu{100000, -1};
  ft::ThreadPool pool(no_such_cpu);
  CHECK_EQ(pool.pinned(), 0);
  SumTask sum(5);
  pool.run(sum);
  CHECK_EQ(sum.agreed(), 4);
}

FT_TEST_MAIN
