// Process-wide counters behind mp_get_stats. Relaxed: they are read for reports, never to decide.
#ifndef MOONPOLY_STATS_H_
#define MOONPOLY_STATS_H_

#include <atomic>
#include <cstdint>

namespace moonpoly {

struct Stats {
  std::atomic<int64_t> plan_hits{0}, plan_misses{0}, launches{0};
  std::atomic<int64_t> plan_miss_ns_total{0}, plan_miss_ns_max{0};

  void add_miss(int64_t ns) {
    plan_misses.fetch_add(1, std::memory_order_relaxed);
    add_miss_time(ns);
  }
  // Of another search for the same product.
  void add_miss_time(int64_t ns) {
    plan_miss_ns_total.fetch_add(ns, std::memory_order_relaxed);
    int64_t max = plan_miss_ns_max.load(std::memory_order_relaxed);
    while (ns > max &&
           !plan_miss_ns_max.compare_exchange_weak(max, ns, std::memory_order_relaxed)) {
    }
  }
};

inline Stats& stats() {
  static Stats instance;
  return instance;
}

}  // namespace moonpoly
#endif  // MOONPOLY_STATS_H_
