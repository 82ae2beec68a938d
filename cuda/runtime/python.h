// The runtime's functions in Python.
#pragma once

#include <nanobind/nanobind.h>

namespace jax_ep {

void export_runtime(nanobind::module_ &m);
void export_bind(nanobind::module_ &m); // set_bind_callback, bind

} // namespace jax_ep
