#include "cuda/ffi/targets.h"

#include "cuda/ffi/call.h"

namespace nb = nanobind;

namespace jax_ep {
namespace {

// Stages other than execute bind all buffers: old headers count them strictly.
XLA_FFI_DEFINE_HANDLER(kInstantiate, instantiate, ffi::Ffi::BindInstantiate().RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER(kInitialize, initialize,
                       ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>()
                           .Ctx<ffi::RunId>().RemainingArgs().RemainingRets().Attrs());

nb::capsule capsule(XLA_FFI_Handler *handler) { return nb::capsule(reinterpret_cast<void *>(handler)); }

} // namespace

nb::dict ffi_targets() {
  nb::dict targets;
  const std::pair<const char *, XLA_FFI_Handler *> handlers[] = {{"jax_ep_dispatch", dispatch_handler()},
                                                                  {"jax_ep_redispatch", redispatch_handler()},
                                                                  {"jax_ep_combine", combine_handler()}};
  for (auto [name, execute] : handlers) {
    nb::dict stages;
    stages["instantiate"] = capsule(kInstantiate);
    stages["initialize"] = capsule(kInitialize);
    stages["execute"] = capsule(execute);
    targets[name] = stages;
  }
  return targets;
}

} // namespace jax_ep
