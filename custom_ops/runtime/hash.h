// A hash of plain structs without padding, for bounded tables: their bytes, eight at a time.
#ifndef MOONPOLY_HASH_H_
#define MOONPOLY_HASH_H_

#include <cstdint>
#include <cstring>

namespace moonpoly {

template <typename T>
uint64_t hash_of(const T& value) {
  static_assert(sizeof(T) % sizeof(uint64_t) == 0, "hashed by words");
  uint64_t words[sizeof(T) / sizeof(uint64_t)];
  std::memcpy(words, &value, sizeof words);
  uint64_t hash = 0;
  for (uint64_t word : words) {
    hash = (hash ^ word) * 0x9e3779b97f4a7c15ull;
    hash ^= hash >> 32;
  }
  return hash;
}

}  // namespace moonpoly
#endif  // MOONPOLY_HASH_H_
