# Decides whether the extension is built, enables CXX and CUDA, and chooses the architectures.
#
# nvcc is looked for where CMake itself looks: CMAKE_CUDA_COMPILER, CUDACXX, CUDAToolkit_ROOT, CUDA_PATH, PATH,
# /usr/local/cuda. Once it is found, whatever fails afterwards is an error and never a silent pure-JAX build.
string(TOLOWER "${JAX_EP_CUDA}" _mode)
if(NOT _mode MATCHES "^(auto|on|off|true|false|1|0)$")
  message(FATAL_ERROR "JAX_EP_CUDA is '${JAX_EP_CUDA}'; expected auto, on or off")
endif()
set(JAX_EP_HAS_CUDA FALSE)
if(_mode MATCHES "^(off|false|0)$")
  return()
endif()

if(NOT CMAKE_CUDA_COMPILER)
  if(DEFINED ENV{CUDACXX})
    set(CMAKE_CUDA_COMPILER "$ENV{CUDACXX}")
  else()
    find_program(JAX_EP_NVCC nvcc NO_CACHE
      HINTS "${CUDAToolkit_ROOT}" ENV CUDAToolkit_ROOT ENV CUDA_PATH ENV CUDA_HOME PATH_SUFFIXES bin
      PATHS /usr/local/cuda/bin)
    if(JAX_EP_NVCC)
      set(CMAKE_CUDA_COMPILER "${JAX_EP_NVCC}")
    endif()
  endif()
endif()
if(NOT CMAKE_CUDA_COMPILER)
  if(_mode STREQUAL "auto")
    return()
  endif()
  message(FATAL_ERROR "JAX_EP_CUDA=${JAX_EP_CUDA}, but nvcc was not found. Install a CUDA toolkit (12 or 13) or give "
    "its place: -DCUDAToolkit_ROOT=DIR or -DCMAKE_CUDA_COMPILER=DIR/bin/nvcc.")
endif()
message(STATUS "jax_ep: CUDA extension with ${CMAKE_CUDA_COMPILER} (JAX_EP_CUDA=off leaves it out)")

# enable_language would fill in an architecture of its own; ours depends on the compiler's version, known only later.
set(_archs ${JAX_EP_CUDA_ARCHS})
if(NOT _archs)
  set(_archs ${CMAKE_CUDA_ARCHITECTURES})
endif()
if(NOT _archs AND DEFINED ENV{CUDAARCHS})
  set(_archs $ENV{CUDAARCHS})
endif()
set(CMAKE_CUDA_ARCHITECTURES OFF)
enable_language(CXX)
enable_language(CUDA)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12)
  message(FATAL_ERROR "nvcc ${CMAKE_CUDA_COMPILER_VERSION} is too old: CUDA 12 or 13 is needed")
endif()
if(NOT _archs)
  set(_archs 80 90)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
    list(APPEND _archs 100)
  endif()
endif()
# Machine code for every architecture listed (PTX alone would be translated in somebody's first call), and PTX of the
# newest for GPUs that come later. An entry with its own suffix (90a-real) is taken as it is.
list(SORT _archs COMPARE NATURAL)
list(POP_BACK _archs _newest)
list(TRANSFORM _archs APPEND "-real" REGEX "^[0-9]+[af]?$")
set(CMAKE_CUDA_ARCHITECTURES ${_archs} ${_newest})
set(JAX_EP_MACHINE_CODE ${_archs} ${_newest}) # told to users whose GPU has none of it
list(TRANSFORM JAX_EP_MACHINE_CODE REPLACE "[^0-9]" "")
string(JOIN "," JAX_EP_MACHINE_CODE ${JAX_EP_MACHINE_CODE})
message(STATUS "jax_ep: nvcc ${CMAKE_CUDA_COMPILER_VERSION}, architectures ${CMAKE_CUDA_ARCHITECTURES}")
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release)
endif()
find_package(CUDAToolkit REQUIRED)
set(JAX_EP_HAS_CUDA TRUE)
