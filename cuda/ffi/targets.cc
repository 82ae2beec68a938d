#include "cuda/ffi/targets.h"

#include <string>
#include <utility>

#include "cuda/ffi/call.h"

namespace nb = nanobind;

namespace jax_ep {
namespace {

// Stages other than execute bind all buffers: old headers count them strictly.
XLA_FFI_DEFINE_HANDLER(kInstantiate, instantiate, ffi::Ffi::BindInstantiate().RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER(kInitialize, initialize,
                       ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>()
                           .Ctx<ffi::RunId>().RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER(kInitializeRecordable, initialize_recordable,
                       ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>()
                           .Ctx<ffi::RunId>().RemainingArgs().RemainingRets().Attrs());

nb::capsule capsule(XLA_FFI_Handler *handler) { return nb::capsule(reinterpret_cast<void *>(handler)); }

} // namespace

nb::dict ffi_targets() {
  nb::dict targets;
  const std::pair<const char *, XLA_FFI_Handler *(*)(Part, bool)> operations[] = {{"jax_ep_dispatch", dispatch_handler},
                                                                            {"jax_ep_redispatch", redispatch_handler},
                                                                            {"jax_ep_combine", combine_handler}};
  const std::pair<const char *, Part> parts[] = {
      {"", Part::kThroughput}, {"_latency", Part::kLatency}, {"_start", Part::kStart}, {"_done", Part::kDone}};
  for (auto [operation, handler_of] : operations) {
    for (auto [suffix, part] : parts) {
      for (bool is_recordable : {false, true}) {
        nb::dict stages;
        stages["instantiate"] = capsule(kInstantiate);
        stages["initialize"] = capsule(is_recordable ? kInitializeRecordable : kInitialize);
        stages["execute"] = capsule(handler_of(part, is_recordable));
        targets[(std::string(operation) + suffix + (is_recordable ? "_graph" : "")).c_str()] = stages;
      }
    }
  }
  return targets;
}

} // namespace jax_ep
