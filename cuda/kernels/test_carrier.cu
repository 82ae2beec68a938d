// The test transport: puts between ranks of one host, by stores to arenas that are reachable anyway. With a delay it does
// what networks may do: it leaves puts for later, does them in any order, late, and their bytes in any order; only a put's
// own word always comes after its bytes.
#include "cuda/kernels/carrier.cuh"

namespace jax_ep {
namespace {

struct Stores {
  const CarrierParams &p;
  uint32_t seed; // the same in all lanes of a warp

  __device__ static uint32_t mix(uint32_t x) {
    x ^= x >> 16, x *= 0x7feb352du, x ^= x >> 15, x *= 0x846ca68bu;
    return x ^ x >> 16;
  }
  __device__ bool takes(int64_t entry) const {
    return !p.max_delay_ns || mix(uint32_t(now_ns()) ^ uint32_t(entry) * 0x9e3779b9u) % 4 == 0;
  }
  __device__ bool at_once(const Put &put) const {
    if (p.max_delay_ns || put.bytes) return false;
    complete(put);
    return true;
  }
  // Turned round, and half of the time backwards.
  __device__ int pick(unsigned lanes, uint32_t look) const {
    if (!p.max_delay_ns) return __ffs(lanes) - 1;
    const uint32_t random = mix(look * 0x9e3779b9u + lanes), turn = random % kWarpSize;
    const unsigned turned = __funnelshift_r(lanes, lanes, turn);
    const int at = random & 0x10000 ? 31 - __clz(turned) : __ffs(turned) - 1;
    return (at + int(turn)) % kWarpSize;
  }
  __device__ int pieces(const Put &put) const { return pieces_of(put.bytes); }
  __device__ void carry(const Put &put, int piece, Mover &mover) {
    const int64_t at = int64_t(piece) * kPieceBytes, bytes = min(put.bytes - at, int64_t(kPieceBytes));
    char *dst = p.peers[put.peer].arena + put.dst + at;
    const char *src = p.arena + put.src + at;
    if (!p.max_delay_ns) return mover.copy(dst, src, bytes);
    seed = mix(seed + uint32_t(put.value) + uint32_t(put.peer) * 0x85ebca6bu);
    if (seed % 2) {
      const uint64_t start = now_ns(), delay = mix(seed) % p.max_delay_ns;
      while (int64_t(now_ns() - start) < int64_t(delay)) {
      }
      __syncwarp();
    }
    // The last bytes first, or as without a delay.
    if (seed % 4 < 2) Mover::units<uint64_t>(dst, src, bytes, true);
    else mover.copy(dst, src, bytes);
  }
  __device__ void complete(const Put &put) const {
    raise_word(*reinterpret_cast<uint64_t *>(p.peers[put.peer].arena + put.signal), put.value);
  }
};

__global__ void __launch_bounds__(kCarrierThreads, 1) test_carrier_kernel(const __grid_constant__ CarrierParams p) {
  carry(p, Stores{p, uint32_t(p.arena[0]) + blockIdx.x * 977u + threadIdx.x / kWarpSize * 131u});
}

} // namespace

cudaError_t launch_test_carrier(const CarrierParams &p, cudaStream_t stream) {
  if (!is_carrier_valid(p)) return cudaErrorInvalidConfiguration;
  test_carrier_kernel<<<p.num_blocks, kCarrierThreads, carrier_shared_bytes(p), stream>>>(p);
  return cudaGetLastError();
}

cudaError_t load_test_carrier() { return load_carrier(test_carrier_kernel); }

} // namespace jax_ep
