#include "pack.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <tuple>

#include "conv_planner.h"
#include "error.h"
#include "planner.h"
#include "vendor_model.h"

namespace moonpoly {
namespace {

constexpr char kMagic[] = "MOONPACK";
constexpr char kRebuild[] = "; rebuild it with `moonpoly pack`";

// The checksum that mp_pack_header describes. Independent terms, so that the compiler vectorises
// it.
uint64_t checksum(const char* data, size_t bytes) {
  uint64_t sum = 0, weight = 0x9e3779b97f4a7c15ull;
  for (size_t at = 0; at < bytes; at += 8, weight += 2) {
    uint64_t word = 0;
    std::memcpy(&word, data + at, std::min<size_t>(8, bytes - at));
    sum += (word ^ (word >> 32)) * weight;
  }
  return sum;
}

template <size_t N>
bool terminated(const char (&text)[N]) {
  return text[0] != '\0' && std::memchr(text, '\0', N) != nullptr;
}

bool is_family(int32_t code) {
  return (code >= MP_GEMM_TMA && code <= MP_GEMM_WS) || (code >= MP_GEMM_DOT && code <= MP_GEMV) ||
         (code >= MP_CONV && code <= MP_CONV_DEPTHWISE_TRANSPOSED);
}

bool is_alignment(int32_t bytes) { return bytes == 2 || bytes == 4 || bytes == 8 || bytes == 16; }

// dev, inode, modification time, size: a pack replaced by renaming is another file.
using FileId = std::tuple<dev_t, ino_t, time_t, long, off_t>;

}  // namespace

std::shared_ptr<const Pack> Pack::open(const std::string& path) {
  static std::mutex mutex;
  static auto& open_packs = *new std::map<FileId, std::weak_ptr<const Pack>>;

  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) fail(MP_BAD_PACK, "kernel pack '", path, "' cannot be opened: ", strerror(errno));
  struct Closer {
    int fd;
    ~Closer() { ::close(fd); }
  } closer{fd};
  struct stat info;
  if (::fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    fail(MP_BAD_PACK, "kernel pack '", path, "' is not a regular file");
  }
  const FileId id{info.st_dev, info.st_ino, info.st_mtim.tv_sec, info.st_mtim.tv_nsec,
                  info.st_size};
  std::lock_guard<std::mutex> lock(mutex);
  if (auto shared = open_packs[id].lock()) return shared;

  if (static_cast<size_t>(info.st_size) < sizeof(mp_pack_header)) {
    fail(MP_BAD_PACK, "kernel pack '", path, "' is truncated: ", info.st_size,
         " bytes, less than its header of ", sizeof(mp_pack_header), kRebuild);
  }
  void* data = ::mmap(nullptr, info.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
  if (data == MAP_FAILED) {
    fail(MP_BAD_PACK, "kernel pack '", path, "' cannot be mapped: ", strerror(errno));
  }
  std::shared_ptr<Pack> pack(new Pack);
  pack->path_ = path;
  pack->data_ = static_cast<const char*>(data);
  pack->bytes_ = info.st_size;
  pack->verify();
  for (int i = 0; i < pack->kernel_count(); ++i) {
    const mp_kernel& k = pack->kernel(i);
    (is_convolution(k) ? pack->convolutions_
                       : pack->classes_[class_index(k.dtype, k.precision, k.trans_a, k.trans_b)])
        .push_back(i);
  }
  open_packs[id] = pack;
  return pack;
}

Pack::~Pack() {
  if (data_) ::munmap(const_cast<char*>(data_), bytes_);
}

void Pack::verify() const {
  const mp_pack_header& h = header();
  const auto refuse = [&](const auto&... why) {
    fail(MP_BAD_PACK, "kernel pack '", path_, "' ", why..., kRebuild);
  };
  if (std::memcmp(h.magic, kMagic, sizeof h.magic) != 0) refuse("is not a MoonPoly pack");
  if (h.version != MP_PACK_VERSION || h.header_bytes != sizeof(mp_pack_header)) {
    refuse("has format version ", h.version, ", this runtime reads version ", MP_PACK_VERSION);
  }
  if (h.file_bytes != bytes_) {
    refuse("is truncated or padded: ", bytes_, " bytes, its header says ", h.file_bytes);
  }
  if (h.checksum != checksum(data_ + sizeof h, bytes_ - sizeof h)) {
    refuse("is corrupt: its checksum does not match its contents");
  }
  // Behind the checksum these guard against a faulty writer, so that no later code need check
  // again.
  const auto holds = [&](int64_t offset, uint64_t count, uint64_t size) {
    return offset >= static_cast<int64_t>(sizeof h) && offset % 4 == 0 &&
           static_cast<uint64_t>(offset) <= bytes_ &&
           count <= (bytes_ - static_cast<uint64_t>(offset)) / size;
  };
  if (h.kernel_count == 0) refuse("holds no kernel");
  if (!holds(h.kernels_offset, h.kernel_count, sizeof(mp_kernel)) || h.kernels_offset % 8 ||
      !holds(h.params_offset, h.param_count, sizeof(int32_t)) || !holds(h.tables_offset, 0, 1) ||
      h.tables_offset % 8) {
    refuse("has a section outside the file or misaligned");
  }
  verify_tables();
  for (uint32_t i = 0; i < h.kernel_count; ++i) verify_kernel(i);
}

void Pack::verify_tables() const {
  int64_t offset = header().tables_offset;
  for (uint32_t i = 0; i < header().table_count; ++i) {
    const auto fits = [&](int64_t bytes) { return bytes <= static_cast<int64_t>(bytes_) - offset; };
    const auto refuse = [&](const auto&... why) {
      fail(MP_BAD_PACK, "kernel pack '", path_, "': table ", i, " ", why..., kRebuild);
    };
    if (!fits(sizeof(mp_table))) refuse("lies outside the file");
    const auto& table = *at<mp_table>(offset);
    if (table.vendor_count < 0 || table.vendor_count > 96 || !fits(table_bytes(table)))
      refuse("lies outside the file");
    for (int32_t j = 0; j < table.vendor_count; ++j) {
      if (const char* why = fault(vendor_costs(table)[j])) {
        refuse("has a model of cuBLASLt that ", why);
      }
    }
    offset += table_bytes(table);
  }
}

void Pack::verify_kernel(int index) const {
  const mp_kernel& k = kernel(index);
  const auto refuse = [&](const auto&... why) {
    fail(MP_BAD_PACK, "kernel pack '", path_, "': kernel ", index, " ", why..., kRebuild);
  };
  if (!terminated(k.name) || !terminated(k.entry)) refuse("has no terminated name");
  if (!is_family(k.family) || k.dtype < 0 || k.dtype > MP_F32 || k.precision < 0 ||
      k.precision > MP_IEEE || (k.trans_a | k.trans_b) & ~1) {
    refuse(k.name, " has an unknown family, dtype, precision or layout");
  }
  if (k.bm <= 0 || k.bn <= 0 || k.bk <= 0 || k.bm > 1024 || k.bn > 1024 || k.bk > 4096 ||
      k.warps <= 0 || k.warps > 32 || k.stages <= 0 || k.shared_bytes < 0 || k.registers < 0) {
    refuse(k.name, " has tile ", k.bm, "x", k.bn, "x", k.bk, ", ", k.warps, " warps, ", k.stages,
           " stages");
  }
  if (k.persistent && (k.warps < 8 || k.warps % 4)) {
    refuse(k.name, " is persistent with ", k.warps, " warps: a warpgroup loads, others multiply");
  }
  if (k.sliced && !(k.persistent && k.split_k)) {
    refuse(k.name, " has slices of K, but is not persistent or does not split K");
  }
  if (!is_alignment(k.align_a) || !is_alignment(k.align_b) || !is_alignment(k.align_c)) {
    refuse(k.name, " has alignments other than 2, 4, 8 or 16 bytes");
  }
  if (k.cubin_bytes < 0 || k.cubin_offset < 0 || static_cast<uint64_t>(k.cubin_offset) > bytes_ ||
      static_cast<uint64_t>(k.cubin_bytes) > bytes_ - static_cast<uint64_t>(k.cubin_offset)) {
    refuse(k.name, " has its cubin outside the file");
  }
  if (k.param_offset < 0 || k.param_count < 0 ||
      static_cast<int64_t>(k.param_offset) + k.param_count > header().param_count) {
    refuse(k.name, " has its parameter list outside the file");
  }
  int arguments = 0;
  for (int i = 0; i < k.param_count; ++i) {
    const int32_t p = params(k)[i];
    const bool of_conv = is_convolution(k) && p >= MP_P_CONV_X && p <= MP_P_CONV_W_W;
    if (is_convolution(k) && p <= MP_P_PTR_BIAS) refuse(k.name, " takes operands of a product");
    if (!of_conv && (p < MP_P_DESC_A || p > MP_P_ACT_BETA))
      refuse(k.name, " has the unknown parameter code ", p);
    arguments += p <= MP_P_DESC_Y ? 7 : 1;
    if (p > MP_P_DESC_Y || k.cubin_bytes == 0) continue;  // a catalog has no boxes
    const mp_desc_shape& d = k.desc[p - MP_P_DESC_A];
    for (int32_t box : d.box) {
      if (box < 1 || box > 256) refuse(k.name, " has a TMA box side of ", box, " (1 to 256)");
    }
    if (d.swizzle < 0 || d.swizzle > 3) refuse(k.name, " has TMA swizzle ", d.swizzle);
  }
  if (arguments > kMaxArguments) refuse(k.name, " takes ", arguments, " launch arguments");
}

const mp_cost* Pack::costs_for(const mp_device& device, const mp_table** table) const {
  int64_t offset = header().tables_offset;
  for (uint32_t i = 0; i < header().table_count; ++i) {
    const auto* t = at<mp_table>(offset);
    offset += table_bytes(*t);
    if (std::strncmp(t->gpu, device.name, sizeof t->gpu) == 0 && t->sm_count == device.sm_count) {
      *table = t;
      return reinterpret_cast<const mp_cost*>(t + 1);
    }
  }
  *table = nullptr;
  return nullptr;
}

std::shared_ptr<const Planner> Pack::planner(const mp_device& device) const {
  mp_device normal = device;
  std::strncpy(normal.name, device.name, sizeof normal.name);  // clears what follows the NUL
  const std::string key(reinterpret_cast<const char*>(&normal), sizeof normal);
  std::lock_guard<std::mutex> lock(planners_mutex_);
  if (planners_.size() >= 64)
    planners_.clear(), conv_planners_.clear();  // only a search over invented devices gets here
  auto& slot = planners_[key];
  if (!slot) slot = std::make_shared<const Planner>(*this, normal);
  return slot;
}

std::shared_ptr<const ConvPlanner> Pack::conv_planner(const mp_device& device) const {
  auto planner = this->planner(device);
  std::lock_guard<std::mutex> lock(planners_mutex_);
  auto& slot = conv_planners_[planner.get()];
  if (!slot) slot = std::make_shared<const ConvPlanner>(*this, std::move(planner));
  return slot;
}

}  // namespace moonpoly
