// RegisterCustomOps: what ONNX Runtime calls when a session registers the library.
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>

#include "conv_op.h"
#include "driver.h"
#include "error.h"
#include "moonpoly.h"
#include "ops.h"
#include "ort.h"
#include "ort_abi.h"
#include "pack.h"

namespace moonpoly {
namespace {

// Marks session options on which the ops are registered. ONNX Runtime itself notices a second time
// only when a session is created, and then says nothing of the library.
constexpr char kRegistered[] = "moonpoly.registered";

std::string config_entry(const Ort& ort, const OrtSessionOptions* options, const char* key) {
  int has = 0;
  ort(ort->HasSessionConfigEntry(options, key, &has));
  if (!has) return "";
  size_t bytes = 0;
  ort(ort->GetSessionConfigEntry(options, key, nullptr, &bytes));
  std::string value(bytes, '\0');
  ort(ort->GetSessionConfigEntry(options, key, value.data(), &bytes));
  return value.c_str();  // without the terminator
}

[[noreturn]] void refuse(const char* key, const std::string& value, const char* accepted) {
  fail(MP_INVALID, "session config entry ", key, " is '", value, "'; accepted: ", accepted);
}

Backend backend_of(const std::string& value) {
  if (value.empty() || value == "auto") return Backend::kAuto;
  if (value == "cuda") return Backend::kCuda;
  if (value == "interpreter") return Backend::kInterpreter;
  refuse("moonpoly.backend", value, "auto, cuda, interpreter");
}

int32_t precision_of(const std::string& value) {
  if (value.empty() || value == "tf32") return MP_TF32;
  if (value == "ieee") return MP_IEEE;
  refuse("moonpoly.precision", value, "tf32, ieee");
}

VendorUse vendor_of(const std::string& value) {
  // For a product that it has not seen the library takes the host 174 us, and 3 ms for a kernel
  // that it has not used: more than it saves, unless shapes repeat.
  if (value.empty() || value == "0") return VendorUse::kOff;
  if (value == "auto") return VendorUse::kAuto;
  if (value == "1") return VendorUse::kOn;
  refuse("moonpoly.vendor", value, "auto, 0, 1");
}

bool repack_of(const std::string& value) {
  if (value.empty() || value == "1") return true;
  if (value == "0") return false;
  refuse("moonpoly.repack", value, "0, 1");
}

const char* environment(const char* name) {
  const char* value = std::getenv(name);
  return value && *value ? value : nullptr;
}

// Beside the library, then the user's cache.
std::vector<std::string> pack_folders() {
  std::vector<std::string> folders;
  Dl_info library;
  if (dladdr(reinterpret_cast<const void*>(&pack_folders), &library) && library.dli_fname) {
    const std::string path = library.dli_fname;
    const size_t slash = path.rfind('/');
    folders.push_back((slash == std::string::npos ? "." : path.substr(0, slash)) + "/packs");
  }
  const char* cache = environment("XDG_CACHE_HOME");
  const char* home = environment("HOME");
  if (cache || home) {
    const std::string base = cache ? cache : std::string(home) + "/.cache";
    folders.push_back(base + "/moonpoly_ort/packs");
  }
  return folders;
}

Settings read_settings(const Ort& ort, const OrtSessionOptions* options) {
  Settings settings;
  settings.backend = backend_of(config_entry(ort, options, "moonpoly.backend"));
  settings.precision = precision_of(config_entry(ort, options, "moonpoly.precision"));
  settings.vendor = vendor_of(config_entry(ort, options, "moonpoly.vendor"));
  settings.repack = repack_of(config_entry(ort, options, "moonpoly.repack"));
  settings.pack_path = config_entry(ort, options, "moonpoly.pack");
  if (const char* path = environment("MOONPOLY_PACK"); path && settings.pack_path.empty()) {
    settings.pack_path = path;
  }
  settings.pack_folders = pack_folders();
  return settings;
}

bool has_cuda_provider(const Ort& ort) {
  char** names = nullptr;
  int count = 0;
  ort(ort->GetAvailableProviders(&names, &count));
  bool found = false;
  for (int i = 0; i < count; ++i) found |= !std::strcmp(names[i], "CUDAExecutionProvider");
  ort(ort->ReleaseAvailableProviders(names, count));
  return found;
}

// Decides `auto`; false: register nothing, so that ONNX Runtime inlines the function bodies.
bool resolve_backend(const Ort& ort, Settings* settings) {
  if (settings->backend == Backend::kInterpreter) return true;
  std::string why;
  const bool usable = try_driver(&why) && device_count() > 0;
  const bool provider = has_cuda_provider(ort);
  if (settings->backend == Backend::kCuda) {
    if (!usable) {
      fail(MP_NO_DRIVER, "moonpoly.backend is cuda, but there is no usable GPU: ",
           why.empty() ? "the driver offers no device" : why);
    }
    if (!provider) {
      fail(MP_NO_DRIVER,
           "moonpoly.backend is cuda, but this ONNX Runtime has no CUDAExecutionProvider; install "
           "onnxruntime-gpu");
    }
  }
  settings->backend = Backend::kCuda;
  return usable && provider;
}

// Whether the session's packs have kernels of convolutions: where one has none, Conv nodes are left
// to ONNX Runtime, which inlines them. A pack that cannot be opened says nothing here: the session
// fails with the reason when it creates a node.
bool has_convolutions(const Settings& settings) {
  std::vector<int> architectures;
  for (int i = 0; i < device_count(); ++i) {
    mp_device device{};
    query_device(i, &device);
    architectures.push_back(device.sm);
  }
  if (settings.backend == Backend::kInterpreter) architectures.resize(1, 90);  // as its nodes do
  for (int sm : architectures) {
    std::shared_ptr<const Pack> pack;
    try {
      pack = settings.open_pack(sm);
    } catch (const Error& e) {
      if (e.status != MP_BAD_PACK) throw;
      continue;
    }
    if (pack->convolutions().empty()) return false;
  }
  return true;
}

// Ops and domains must outlive every session that uses them, and nothing tells when the last one is
// gone. Sessions with equal settings share one domain, so that what is kept is bounded by how many
// different settings a process uses.
OrtCustomOpDomain* domain_for(const Ort& ort, const Settings& settings) {
  struct Registered {
    std::vector<std::unique_ptr<Op>> ops;
    std::vector<std::unique_ptr<ConvOp>> conv_ops;
    OrtCustomOpDomain* domain = nullptr;
  };
  static std::mutex mutex;
  static auto& domains = *new std::map<std::string, Registered>;

  const bool convolves = has_convolutions(settings);
  std::ostringstream key;
  key << convolves << '|' << ort.api() << '|' << static_cast<int>(settings.backend) << '|'
      << settings.precision << '|' << static_cast<int>(settings.vendor) << '|' << settings.repack
      << '|' << settings.pack_path;
  for (const auto& folder : settings.pack_folders) key << '|' << folder;
  std::lock_guard<std::mutex> lock(mutex);
  Registered& entry = domains[key.str()];
  if (entry.domain) return entry.domain;
  entry.ops.clear();  // of an attempt that failed
  entry.conv_ops.clear();
  const auto shared = std::make_shared<const Settings>(settings);
  OrtCustomOpDomain* domain = nullptr;
  ort(ort->CreateCustomOpDomain("ai.moonpoly", &domain));
  for (const OpStructure& structure : op_structures()) {
    if (structure.convolves() && !convolves) continue;
    for (int32_t dtype : {MP_F16, MP_BF16, MP_F32}) {
      if (structure.wide() && dtype == MP_F32) continue;
      NodeOp* op;
      if (structure.convolves()) {
        entry.conv_ops.push_back(std::make_unique<ConvOp>(ort, structure, dtype, shared));
        op = entry.conv_ops.back().get();
      } else {
        entry.ops.push_back(std::make_unique<Op>(ort, structure, dtype, shared));
        op = entry.ops.back().get();
      }
      ort(ort->CustomOpDomain_Add(domain, op));
    }
  }
  return entry.domain = domain;
}

}  // namespace
}  // namespace moonpoly

extern "C" __attribute__((visibility("default"))) moonpoly::OrtStatus* RegisterCustomOps(
    moonpoly::OrtSessionOptions* options, const moonpoly::OrtApiBase* base) {
  using namespace moonpoly;
  const OrtApi* api = base->GetApi(kOrtApiVersion);
  if (!api) {
    // Every ONNX Runtime offers API 1, whose first function makes the status.
    const std::string text = std::string("MoonPoly is built for ONNX Runtime API ") +
                             std::to_string(kOrtApiVersion) +
                             " (1.22 and later); this runtime is " + base->GetVersionString() +
                             ". Install onnxruntime >= 1.23.";
    return base->GetApi(1)->CreateStatus(ORT_FAIL, text.c_str());
  }
  return guarded(api, [&] {
    const Ort ort(api, base->GetVersionString());
    if (!config_entry(ort, options, kRegistered).empty()) {
      fail(MP_INVALID,
           "the library is registered on these session options already; register it once, or use "
           "new session options");
    }
    Settings settings = read_settings(ort, options);
    if (!resolve_backend(ort, &settings)) return;
    ort(ort->AddCustomOpDomain(options, domain_for(ort, settings)));
    ort(ort->AddSessionConfigEntry(options, kRegistered, "1"));
  });
}
