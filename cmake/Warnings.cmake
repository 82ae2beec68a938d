# Target jax_ep_warnings: warnings for our own sources, errors with JAX_EP_WERROR (developer preset and CI).
add_library(jax_ep_warnings INTERFACE)
target_compile_options(jax_ep_warnings INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra>
  $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra>)
if(JAX_EP_WERROR)
  target_compile_options(jax_ep_warnings INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-Werror>
    $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings -Xcompiler=-Werror>)
endif()
