"""The process grid of a run: one mesh, with a dimension for each way in which ranks share the work."""

import torch
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from llm_train_bench.parallel.ranks import collective_timeout


def build_mesh(device: torch.device, sizes: dict[str, int], timeout_s: float) -> DeviceMesh:
    """A mesh of all ranks; `sizes` are its dimensions from the outermost, their product the world.

    A dimension of one rank is left out, apart from the last.
    """
    *outer, last = sizes.items()
    kept = dict([(name, size) for name, size in outer if size > 1] + [last])
    mesh = init_device_mesh(device.type, tuple(kept.values()), mesh_dim_names=tuple(kept))
    if len(kept) > 1:
        set_timeouts(mesh, device, timeout_s)
    return mesh


def set_timeouts(mesh: DeviceMesh, device: torch.device, timeout_s: float) -> None:
    """Give the groups of a mesh the timeout of collectives; groups of their own do not inherit it."""
    for name in mesh.mesh_dim_names:
        timeout = collective_timeout(device, timeout_s)
        distributed_c10d._set_pg_timeout(timeout, mesh.get_group(name))
