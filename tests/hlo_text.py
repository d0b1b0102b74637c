"""Small HLO programs as text, whose times can be added up by hand, and the round rates of their plans.

Rates: 100 TFLOP/s, 1 TB/s of memory, 20 GB/s to the host, 10 GB/s on the network with 100 us from node to node. NVLink has
100 GB/s, and 1% of overhead for every message. So 100 MB take 0.1 ms in memory and 1.01 ms on NVLink.
"""

from jaxtrain.plan import result
from jaxtrain.plan.program import collectives, hlo

FULL = ((1.0, 1 / 1.01),)
RATES = result.Rates(100.0, 50.0, 25.0, 1.0, 100.0, 10.0, 20.0, 100.0, "round figures", 200.0, FULL)

ELEMENTS = 25_000_000  # float32 elements: 100 MB
BIG = f"f32[{ELEMENTS}]{{0}}"
COMPUTATIONS = f"""
%twice (p: f32[{ELEMENTS}]) -> f32[{ELEMENTS}] {{
  %p = {BIG} parameter(0)
  ROOT %t = {BIG} add(%p, %p)
}}

%matmul (a: bf16[1000,5000], b: bf16[5000,10000]) -> bf16[1000,10000] {{
  %a = bf16[1000,5000]{{1,0}} parameter(0)
  %b = bf16[5000,10000]{{1,0}} parameter(1)
  ROOT %d = bf16[1000,10000]{{1,0}} dot(%a, %b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}
"""
ARGUMENTS = f"""
  %x = {BIG} parameter(0)
  %a.1 = bf16[1000,5000]{{1,0}} parameter(1)
  %b.1 = bf16[5000,10000]{{1,0}} parameter(2)"""
GATHER = f"(({BIG}), {BIG}) all-gather-start(%x), replica_groups={{{{0,1}}}}, dimensions={{0}}"


def read(entry: str, before: str = "") -> hlo.Module:
    """Return a module whose entry computation has the lines `entry`, after the computations `before`.

    The lines may use the arrays x (100 MB), a.1 and b.1 (the inputs of `gemm`), and the computations `twice` and `matmul`.
    """
    computations = f"{COMPUTATIONS}{before}\nENTRY %main (x: f32[1]) -> f32[1] {{{ARGUMENTS}{entry}\n}}\n"
    return hlo.parse_hlo(f"HloModule small, is_scheduled=true\n{computations}")


def moves(name: str, megabytes: float = 100.0, network: float = 0.0, hops: int = 0) -> dict[str, collectives.CollectiveOp]:
    """Return {name: an all-gather}. It sends `megabytes` MB on the wire, `network` MB of them between nodes in `hops` hops."""
    return {
        name: collectives.CollectiveOp(
            "all-gather", "f32", "fsdp", 2, 1, megabytes * 1e6, network * 1e6, "", "", name, (), hops
        )
    }


def gemm(name: str) -> str:
    """Return a GEMM of 1,000 x 5,000 x 10,000: 0.1 TFLOP, so 1 ms. Its memory traffic of 130 MB would take 0.13 ms."""
    return f"\n  %{name} = bf16[1000,10000]{{1,0}} fusion(%a.1, %b.1), kind=kCustom, calls=%matmul"
