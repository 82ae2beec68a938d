# Target nvshmem: headers and libraries of NVSHMEM, from JAX_EP_NVSHMEM_DIR (include/ and lib/) or the wheel that is installed
# for the Python that builds. Sets JAX_EP_HAS_NVSHMEM. Without it there is no transport over hosts, and all else is complete.
#
# A module that was built against one version runs on it and on newer ones, never on older ones.
set(JAX_EP_NVSHMEM_OLDEST 3.4.5)
set(JAX_EP_HAS_NVSHMEM FALSE)
set(JAX_EP_NVSHMEM_DIR "" CACHE PATH "Folder with NVSHMEM's include and lib. Empty: the wheel nvidia-nvshmem-cu12 or -cu13")
set(_dir "${JAX_EP_NVSHMEM_DIR}")
if(NOT _dir)
  # A wheel is found by its files: it has no CMake configuration, and no library under the name that linkers look for.
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c [[
import importlib.util
try:
    spec = importlib.util.find_spec("nvidia.nvshmem")
except ModuleNotFoundError:
    spec = None
print(next(iter(spec.submodule_search_locations), "") if spec else "")
]]
    OUTPUT_VARIABLE _dir OUTPUT_STRIP_TRAILING_WHITESPACE)
endif()
if(NOT _dir)
  message(STATUS "jax_ep: no NVSHMEM (pip install nvidia-nvshmem-cu${CUDAToolkit_VERSION_MAJOR}==${JAX_EP_NVSHMEM_OLDEST}, "
    "or -DJAX_EP_NVSHMEM_DIR): no transport between hosts")
  return()
endif()
foreach(_file include/nvshmem.h include/non_abi/nvshmem_version.h lib/libnvshmem_host.so.3 lib/libnvshmem_device.a)
  if(NOT EXISTS "${_dir}/${_file}")
    message(FATAL_ERROR "NVSHMEM in ${_dir} has no ${_file}; give another folder as JAX_EP_NVSHMEM_DIR")
  endif()
endforeach()
file(STRINGS "${_dir}/include/non_abi/nvshmem_version.h" _lines REGEX "NVSHMEM_VENDOR_(MAJOR|MINOR|PATCH)_VERSION +[0-9]+")
string(REGEX REPLACE "[^0-9]+" "." _found "${_lines}")
string(REGEX REPLACE "^\\.|\\.$" "" _found "${_found}")
if(_found VERSION_LESS JAX_EP_NVSHMEM_OLDEST OR _found VERSION_GREATER_EQUAL 4)
  message(FATAL_ERROR "NVSHMEM in ${_dir} is ${_found}, expected at least ${JAX_EP_NVSHMEM_OLDEST} and less than 4: "
    "pip install nvidia-nvshmem-cu${CUDAToolkit_VERSION_MAJOR}==${JAX_EP_NVSHMEM_OLDEST}")
endif()
message(STATUS "jax_ep: NVSHMEM ${_found} in ${_dir}")
add_library(nvshmem INTERFACE)
target_include_directories(nvshmem SYSTEM INTERFACE "${_dir}/include")
target_link_libraries(nvshmem INTERFACE "${_dir}/lib/libnvshmem_device.a" "${_dir}/lib/libnvshmem_host.so.3")
set(JAX_EP_NVSHMEM_LIB "${_dir}/lib")
set(JAX_EP_HAS_NVSHMEM TRUE)
