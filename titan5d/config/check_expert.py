"""Rules about how experts are cut: into shares of whole experts (ep), and each into slices of its width (etp)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from titan5d.config.schema import Config
from titan5d.topology import Topology

if TYPE_CHECKING:
    from titan5d.models.args import ModelArgs


def expert_problems(config: Config, args: ModelArgs, topology: Topology) -> list[str]:
    """What is wrong with the two degrees, each with the degrees that would fit."""
    key, ep = "parallelism.expert_parallel_degree", topology.ep
    slices_key, etp = "parallelism.expert_tensor_parallel_degree", topology.etp
    degrees = {key: ep, slices_key: etp}
    if wrong := [f"{name} = {degree}: a degree is 1 or more" for name, degree in degrees.items() if degree < 1]:
        return wrong
    if not args.n_experts:
        return [
            f"{name} = {degree} shares experts, but model.flavor = {config.model.flavor!r} of {config.model.name} has"
            " none (model.n_experts = 0); set 1"
            for name, degree in degrees.items()
            if degree > 1
        ]
    ranks, problems = topology.dp_shard * topology.cp * topology.tp, []
    fitting = [n for n in range(1, ranks + 1) if ranks % n == 0 and args.n_experts % n == 0]
    use = f"degrees that fit both: {', '.join(map(str, fitting))}"
    if ranks % ep:
        problems.append(
            f"{key} = {ep} does not divide the {ranks} ranks that share the rest of the model,"
            f" data_parallel_shard_degree {topology.dp_shard} x context_parallel_degree {topology.cp} x"
            f" tensor_parallel_degree {topology.tp} (replicas and pipeline stages have all experts each); {use}"
        )
    if args.n_experts % ep:
        problems.append(
            f"{key} = {ep} does not divide model.n_experts = {args.n_experts}, and each rank holds whole experts, all"
            f" the same number; {use}. The weights of one expert are shared by the other ranks, as zero_stage says"
        )
    if etp == 1 or ranks % ep:
        return problems
    rest, width = ranks // ep, args.moe_ffn_dim
    fitting = [n for n in range(1, rest + 1) if rest % n == 0 and width % n == 0]
    use = f"degrees that fit both: {', '.join(map(str, fitting))}"
    if rest % etp:
        problems.append(
            f"{slices_key} = {etp} does not divide the {rest} ranks that each expert has, {ranks} that share the rest"
            f" of the model (data_parallel_shard_degree {topology.dp_shard} x context_parallel_degree {topology.cp} x"
            f" tensor_parallel_degree {topology.tp}) / expert_parallel_degree {ep}; {use}"
        )
    if width % etp:
        problems.append(
            f"{slices_key} = {etp} does not divide model.moe_ffn_dim = {width}, of which each rank holds an equal"
            f" slice; {use}"
        )
    return problems
