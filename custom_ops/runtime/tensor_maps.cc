#include "tensor_maps.h"

#include <cstring>

#include "hash.h"

namespace moonpoly {

bool TensorMaps::find(const Key& key, CUtensorMap* out) const {
  const size_t set = hash_of(key) % kSets;
  std::lock_guard<std::mutex> lock(locks_[set % kLocks]);
  for (const Entry& entry : sets_[set].ways) {
    if (std::memcmp(&entry.key, &key, sizeof key) == 0) {
      *out = entry.map;
      return true;
    }
  }
  return false;
}

void TensorMaps::remember(const Key& key, const CUtensorMap& map) {
  const uint64_t hash = hash_of(key);
  const size_t set = hash % kSets;
  std::lock_guard<std::mutex> lock(locks_[set % kLocks]);
  auto& ways = sets_[set].ways;
  static_assert(kWays == 2);
  ways[1] = ways[0];  // the one that was met before it stays
  ways[0] = {map, key};
}

}  // namespace moonpoly
