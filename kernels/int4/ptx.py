"""The PTX that `stream_k.py` speaks where Gluon's own operations would make all warps wait for each other.

Gluon puts a barrier of the whole group before every arrival at an mbarrier and every second wait for one, and
a fence of all memory before a copy into memory it has seen written. Here each warp waits and arrives for
itself. Addresses are offsets into shared memory, whose one allocation lies at its start (a test looks).

Each function returns the text for `inline_asm_elementwise`, or is a Gluon function around such a text.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def lines(*parts):
    return "{\n" + "\n".join(parts) + "\n}"


@gluon.constexpr_function
def init_mbarriers_asm(ready, free, sent, stages, tails, warps):
    """Thread 0 makes the barriers: one arrival fills a stage; all warps free it, and send a tail."""
    inits = [f"@p mbarrier.init.shared::cta.b64 [a+{ready + 8 * i}], 1;" for i in range(stages)]
    inits += [f"@p mbarrier.init.shared::cta.b64 [a+{free + 8 * i}], {warps};" for i in range(stages)]
    inits += [f"@p mbarrier.init.shared::cta.b64 [a+{sent + 8 * i}], {warps};" for i in range(tails)]
    start = (".reg .pred p;", ".reg .b32 a;", "mov.u32 a, %tid.x;", "setp.eq.u32 p, a, 0;")
    return lines(*start, "mov.u32 a, global_smem;", *inits, "mov.u32 $0, 0;")


@gluon.constexpr_function
def expect_bytes_asm(ready, count):
    """Lane 0 announces `count` bytes at the barrier of the stage `$1` bytes on, where `$2`."""
    return lines(
        ".reg .pred p;", ".reg .b32 a, l;", "mov.u32 l, %laneid;", "setp.eq.u32 p, l, 0;",
        "setp.ne.and.u32 p, $2, 0, p;", "mov.u32 a, global_smem;", "add.u32 a, a, $1;",
        f"@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [a+{ready}], {count};", "mov.u32 $0, 0;",
    )  # fmt: skip


@gluon.constexpr_function
def mbarrier_wait_asm():
    return lines(
        ".reg .pred p;", ".reg .b32 a;", "mov.u32 a, global_smem;", "add.u32 a, a, $1;", "again:",
        "mbarrier.try_wait.parity.shared::cta.b64 p, [a], $2;", "@!p bra again;", "mov.u32 $0, 0;",
    )  # fmt: skip


@gluon.constexpr_function
def mbarrier_arrive_asm():
    return lines(
        ".reg .pred p;", ".reg .b32 a, l;", "mov.u32 l, %laneid;", "setp.eq.u32 p, l, 0;",
        "setp.ne.and.u32 p, $2, 0, p;", "mov.u32 a, global_smem;", "add.u32 a, a, $1;",
        "@p mbarrier.arrive.shared::cta.b64 _, [a];", "mov.u32 $0, 0;",
    )  # fmt: skip


@gluon.jit
def mbarrier_wait(barrier, phase):
    """Until the phase of the barrier at this offset is over."""
    gl.inline_asm_elementwise(
        mbarrier_wait_asm(), "=r,r,r", [barrier, phase], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def mbarrier_arrive(barrier, pred):
    """One arrival for this warp. What its lanes read was used by the wgmma issued since, so it is read."""
    gl.inline_asm_elementwise(
        mbarrier_arrive_asm(), "=r,r,r", [barrier, pred.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.constexpr_function
def load_shared_v4_asm(offset):
    return lines(
        ".reg .b32 a;", "mov.u32 a, global_smem;", "add.u32 a, a, $4;",
        f"ld.shared.v4.b32 {{$0,$1,$2,$3}}, [a+{offset}];",
    )  # fmt: skip


@gluon.constexpr_function
def load_shared_asm(offset):
    return lines(
        ".reg .b32 a;", "mov.u32 a, global_smem;", "add.u32 a, a, $1;", f"ld.shared.b32 $0, [a+{offset}];"
    )


@gluon.constexpr_function
def load_shared_pair_asm(offset, step):
    return lines(
        ".reg .b32 a;", "mov.u32 a, global_smem;", "add.u32 a, a, $2;",
        f"ld.shared.b32 $0, [a+{offset}];", f"ld.shared.b32 $1, [a+{offset + step}];",
    )  # fmt: skip


@gluon.jit
def here(pointer):
    """The pointer as a number, worked out here: what is made from it is not moved out of a loop."""
    return gl.inline_asm_elementwise(
        "mov.b64 $0, $1;", "=l,l", [pointer.to(gl.int64)], dtype=gl.int64, is_pure=False, pack=1
    )


@gluon.constexpr_function
def store_partials_asm(offset):
    """Four sums to scratch memory, `offset` bytes behind an address."""
    results = [f"mov.u32 ${i}, 0;" for i in range(4)]
    return lines(f"st.global.v4.b32 [$8+{offset}], {{$4,$5,$6,$7}};", *results)


@gluon.constexpr_function
def load_partials_asm(offset):
    """Four of another CTA's sums, or zeros."""
    zeros = [f"mov.b32 ${i}, 0;" for i in range(4)]
    return lines(
        ".reg .pred p;", "setp.ne.b32 p, $8, 0;", *zeros,
        f"@p ld.global.cg.v4.b32 {{$0,$1,$2,$3}}, [$4+{offset}];",
    )  # fmt: skip


@gluon.constexpr_function
def max_abs_asm():
    """The greatest of four sums' magnitudes and `$8`, four times."""
    results = [f"mov.f32 ${i}, a;" for i in range(4)]
    return lines(
        ".reg .f32 a, b;", "abs.f32 a, $4;", "abs.f32 b, $5;", "max.f32 a, a, b;", "abs.f32 b, $6;",
        "max.f32 a, a, b;", "abs.f32 b, $7;", "max.f32 a, a, b;", "max.f32 a, a, $8;", *results,
    )  # fmt: skip


@gluon.constexpr_function
def store_fp16_asm(offset):
    """Eight sums times `$12`, in fp16, to scratch memory, `offset` bytes behind an address."""
    halves = []
    for i in range(4):
        halves += [f"mul.f32 a, ${4 + 2 * i}, $12;", f"mul.f32 b, ${5 + 2 * i}, $12;"]
        halves.append(f"cvt.rn.f16x2.f32 h{i}, b, a;")
    results = [f"mov.u32 ${i}, 0;" for i in range(4)]
    store = f"st.global.v4.b32 [$16+{offset}], {{h0,h1,h2,h3}};"
    return lines(".reg .f32 a, b;", ".reg .b32 h<4>;", *halves, store, *results)


@gluon.constexpr_function
def store_scale_asm(offset):
    """A number to scratch memory, `offset` bytes behind an address."""
    results = [f"mov.u32 ${i}, 0;" for i in range(4)]
    return lines(f"st.global.f32 [$8+{offset}], $4;", *results)


@gluon.constexpr_function
def elected_asm(of, instruction):
    """What thread 0 ("tid.x") or lane 0 ("laneid") does with the counter `$1`."""
    return lines(
        ".reg .pred p;", ".reg .b32 t;", f"mov.u32 t, %{of};", "setp.eq.u32 p, t, 0;",
        f"@p {instruction};", "mov.u32 $0, 0;",
    )  # fmt: skip


@gluon.constexpr_function
def acquire_wait_asm():
    return lines(
        ".reg .pred p;", ".reg .b32 v;", "again:", "ld.acquire.gpu.global.b32 v, [$1];",
        "setp.lt.u32 p, v, $2;", "@p bra again;", "mov.u32 $0, 0;",
    )  # fmt: skip


@gluon.jit
def release_increment(counter, OF: gl.constexpr):
    """The first thread or lane counts one; who sees that sees what it has seen written."""
    gl.inline_asm_elementwise(
        elected_asm(OF, "red.release.gpu.global.add.u32 [$1], 1"), "=r,l", [counter.to(gl.int64)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def acquire_wait(counter, wanted):
    gl.inline_asm_elementwise(
        acquire_wait_asm(), "=r,l,r", [counter.to(gl.int64), wanted], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def clear(counter, OF: gl.constexpr):
    gl.inline_asm_elementwise(
        elected_asm(OF, "st.global.b32 [$1], 0"), "=r,l", [counter.to(gl.int64)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.constexpr_function
def store_y_asm(half):
    """Four sums of a thread, two neighbours in M of two rows of the weight, to four neighbours in a row of y.

    Exchanged in the warp, twice: blocks of eight by eight with rows for columns, then between lanes side by
    side, so that four lanes fill the 32 bytes that memory takes at once.
    """
    kind = "f16x2" if half else "bf16x2"
    return lines(
        ".reg .pred p, q;", ".reg .b32 s, t, u;",
        f"cvt.rn.{kind}.f32 t, $5, $4;", "movmatrix.sync.aligned.m8n8.trans.b16 t, t;",
        f"cvt.rn.{kind}.f32 u, $7, $6;", "movmatrix.sync.aligned.m8n8.trans.b16 u, u;",
        "mov.u32 s, %laneid;", "and.b32 s, s, 1;", "setp.ne.u32 q, s, 0;", "selp.b32 s, t, u, q;",
        "shfl.sync.bfly.b32 s, s, 1, 31, 0xffffffff;", "@!q mov.b32 u, s;", "@q mov.b32 t, s;",
        "setp.ne.b32 p, $12, 0;", "@p st.global.v2.b32 [$8], {t,u};",
        "mov.u32 $0, 0;", "mov.u32 $1, 0;", "mov.u32 $2, 0;", "mov.u32 $3, 0;",
    )  # fmt: skip


@gluon.constexpr_function
def load_fp16_asm(offset, shared):
    """Eight sums in fp16 from shared or from scratch memory, `offset` bytes behind a place, as fp32."""
    parts = [
        f"mov.b32 {{a, b}}, h{i}; cvt.f32.f16 ${2 * i}, a; cvt.f32.f16 ${2 * i + 1}, b;" for i in range(4)
    ]
    return lines(
        ".reg .b16 a, b;", ".reg .b32 p, h<4>;", *loads("v4.b32 {h0,h1,h2,h3}", 8, offset, shared), *parts
    )


@gluon.constexpr_function
def load_scale_asm(offset, shared):
    """A number from there, four times."""
    copies = [f"mov.f32 ${i}, a;" for i in range(4)]
    return lines(".reg .f32 a;", ".reg .b32 p;", *loads("f32 a", 4, offset, shared), *copies)


@gluon.constexpr_function
def loads(what, operand, offset, shared):
    if shared:
        place = ("mov.u32 p, global_smem;", f"add.u32 p, p, ${operand};")
        return (*place, f"ld.shared.{what}, [p+{offset}];")
    return (f"ld.global.cg.{what}, [${operand}+{offset}];",)


@gluon.constexpr_function
def loads_constraints(results, shared):
    return ",".join(["=f"] * results + ["r" if shared else "l"] * 4)


@gluon.constexpr_function
def bulk_copy_asm(count, more, ready, words):
    """Lane 0 copies `count` bytes from `$1` and `more` from `$2`, which other CTAs wrote, to shared memory.

    To `$3`, and to `$4` behind `words`, announced at the barrier `$5` behind `ready`.
    """
    copy = "@p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    return lines(
        ".reg .pred p;", ".reg .b32 a, b, c, l;", "mov.u32 l, %laneid;", "setp.eq.u32 p, l, 0;",
        "mov.u32 l, global_smem;", "add.u32 a, l, $3;", "add.u32 b, l, $4;", f"add.u32 b, b, {words};",
        "add.u32 c, l, $5;", f"add.u32 c, c, {ready};", "@p fence.proxy.async;",
        f"@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [c], {count + more};",
        f"{copy} [a], [$1], {count}, [c];", f"{copy} [b], [$2], {more}, [c];", "mov.u32 $0, 0;",
    )  # fmt: skip


@gluon.jit
def sync_warp():
    """What this warp's lanes wrote is seen by who sees its next arrival."""
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.u32 $0, $1;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1
    )
