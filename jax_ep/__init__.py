"""Expert-parallel communication for JAX: dispatch tokens to their experts, combine the outputs."""

from jax_ep import debug as debug
from jax_ep import errors as errors
from jax_ep.bootstrap import check as check
from jax_ep.bootstrap import reset as reset
from jax_ep.combine import combine as combine
from jax_ep.config import Config as Config
from jax_ep.dispatch import dispatch as dispatch
from jax_ep.experts import balance as balance
from jax_ep.experts import gather_replicas as gather_replicas
from jax_ep.layout import Handle as Handle
from jax_ep.layout import Recv as Recv
from jax_ep.memory import BufferBytes as BufferBytes
from jax_ep.memory import buffer_bytes as buffer_bytes
from jax_ep.quantize import Quantized as Quantized
from jax_ep.quantize import quantize as quantize
from jax_ep.routing import RoutingLayout as RoutingLayout
from jax_ep.routing import routing_layout as routing_layout
from jax_ep.split import Pending as Pending
from jax_ep.split import combine_done as combine_done
from jax_ep.split import combine_start as combine_start
from jax_ep.split import dispatch_done as dispatch_done
from jax_ep.split import dispatch_start as dispatch_start
from jax_ep.topology import make_mesh as make_mesh
from jax_ep.windowed import windowed as windowed

__version__ = "0.1.0"
