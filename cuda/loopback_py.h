#pragma once

#include <nanobind/nanobind.h>

namespace jax_ep {

void export_loopback(nanobind::module_ &m); // adds class Loopback

} // namespace jax_ep
