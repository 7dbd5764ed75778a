#!/usr/bin/env python3
"""Print the values of ONEDNN_MAX_CPU_ISA that give MindSpore's oneDNN fewer instructions than this core has.

scripts/test.sh runs the tests of the kernels under each of them.
"""

from __future__ import annotations

from mindnlp_dp.kernels.onednn import effective_isa

# Their bits in dnnl_cpu_isa_t.
_SETS = {"AVX2": 0x7, "AVX512_CORE": 0x27, "AVX512_CORE_BF16": 0xE7}

if __name__ == "__main__":
    own = effective_isa()
    print(*(name for name, bits in _SETS.items() if bits & own == bits != own))
