# Target xla_ffi: XLA's FFI headers, copied from jaxlib 0.8.0 (cuda/third_party/README.md).
#
# A handler built against newer headers than the jaxlib that loads it makes JAX refuse its whole backend, while an older
# one runs everywhere; so the oldest supported jaxlib's headers are carried, whichever jaxlib is installed here.
add_library(xla_ffi INTERFACE)
target_include_directories(xla_ffi SYSTEM INTERFACE "${CMAKE_CURRENT_SOURCE_DIR}/cuda/third_party")
