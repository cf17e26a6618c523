"""Inline PTX of the stream-K kernel: mbarriers, shared loads, semaphores, partial sums, stores of y.

Gluon puts a barrier of the whole group before every mbarrier arrive and every second wait, and a fence of all
memory before a TMA load into memory that the group has written. In this file each warp waits and arrives for
itself. Addresses in shared memory are byte offsets into its one allocation, which lies at `global_smem` (a
test checks that).

Each operation is a Gluon function with its PTX above it. The PTX names its operands, and the function `ptx`
replaces the names by numbers: results first, then arguments. With `pack=4` an argument is four registers, one
for each value of a thread. `inline_asm_elementwise` needs a result, so an instruction without a result sets
`unused` to zero.
"""

from ..triton_imports import gl, gluon


@gluon.constexpr_function
def ptx(operands, *lines):
    """Return PTX in braces with `$name` replaced by `$0`, `$1`, ... in the order of `operands`.

    operands: names between spaces; `name*4` declares $name0 to $name3.
    """
    names = []
    for operand in operands.split():
        name, _, count = operand.partition("*")
        names += [f"{name}{i}" for i in range(int(count))] if count else [name]
    text = "{\n" + "\n".join(lines) + "\n}"
    for name in sorted(names, reverse=True):  # of two where one begins the other, the longer first
        text = text.replace("$" + name, f"${names.index(name)}")
    return text


@gluon.constexpr_function
def zero(name, count):
    return [f"mov.u32 ${name}{i}, 0;" for i in range(count)]


# Mbarriers. ------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def init_mbarriers_asm(full, empty, sent, x_full, stages, tails, warps, reordering):
    inits = [f"@p mbarrier.init.shared::cta.b64 [a+{full + 8 * i}], {1 + reordering};" for i in range(stages)]
    if reordering:
        inits += [f"@p mbarrier.init.shared::cta.b64 [a+{x_full + 8 * i}], 1;" for i in range(stages)]
    inits += [f"@p mbarrier.init.shared::cta.b64 [a+{empty + 8 * i}], {warps};" for i in range(stages)]
    inits += [f"@p mbarrier.init.shared::cta.b64 [a+{sent + 8 * i}], {warps};" for i in range(tails)]
    start = (".reg .pred p;", ".reg .b32 a;", "mov.u32 a, %tid.x;", "setp.eq.u32 p, a, 0;")
    return ptx("unused any", *start, "mov.u32 a, global_smem;", *inits, "mov.u32 $unused, 0;")


@gluon.jit
def init_mbarriers(any_value, t, smem, TAILS: gl.constexpr, REORDERING: gl.constexpr):
    """Let thread 0 initialize the mbarriers. One arrival marks a stage as full; all warps have to arrive to
    mark a stage as empty, or a tail as sent.

    REORDERING: warps that reorder x, and arrive at full stages too
    """
    asm: gl.constexpr = init_mbarriers_asm(
        smem.FULL, smem.EMPTY, smem.SENT, smem.X_FULL, t.STAGES, TAILS, t.BN // 16, REORDERING
    )
    gl.inline_asm_elementwise(asm, "=r,r", [any_value], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def mbarrier_expect_asm(full, count):
    return ptx(
        "unused barrier pred",
        ".reg .pred p;", ".reg .b32 a, l;", "mov.u32 l, %laneid;", "setp.eq.u32 p, l, 0;",
        "setp.ne.and.u32 p, $pred, 0, p;", "mov.u32 a, global_smem;", "add.u32 a, a, $barrier;",
        f"@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [a+{full}], {count};", "mov.u32 $unused, 0;",
    )  # fmt: skip


@gluon.jit
def mbarrier_expect(barrier, pred, FULL: gl.constexpr, BYTES: gl.constexpr):
    """Let lane 0 arrive at the mbarrier `barrier` bytes behind `FULL`, expecting `BYTES`, if `pred`."""
    gl.inline_asm_elementwise(
        mbarrier_expect_asm(FULL, BYTES), "=r,r,r", [barrier, pred], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.constexpr_function
def mbarrier_wait_asm():
    return ptx(
        "unused barrier phase",
        ".reg .pred p;", ".reg .b32 a;", "mov.u32 a, global_smem;", "add.u32 a, a, $barrier;", "again:",
        "mbarrier.try_wait.parity.shared::cta.b64 p, [a], $phase;", "@!p bra again;", "mov.u32 $unused, 0;",
    )  # fmt: skip


@gluon.jit
def mbarrier_wait(barrier, phase):
    """Let every lane wait until this phase of the mbarrier is over."""
    gl.inline_asm_elementwise(
        mbarrier_wait_asm(), "=r,r,r", [barrier, phase], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.constexpr_function
def mbarrier_arrive_asm():
    return ptx(
        "unused barrier pred",
        ".reg .pred p;", ".reg .b32 a, l;", "mov.u32 l, %laneid;", "setp.eq.u32 p, l, 0;",
        "setp.ne.and.u32 p, $pred, 0, p;", "mov.u32 a, global_smem;", "add.u32 a, a, $barrier;",
        "@p mbarrier.arrive.shared::cta.b64 _, [a];", "mov.u32 $unused, 0;",
    )  # fmt: skip


@gluon.jit
def mbarrier_arrive(barrier, pred):
    """Let this warp arrive once at the mbarrier. The wgmma that was issued since a lane's last read used the
    words of that read, so the read is complete.
    """
    gl.inline_asm_elementwise(
        mbarrier_arrive_asm(), "=r,r,r", [barrier, pred.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def sync_warp():
    """Order this warp's writes before its next mbarrier arrive."""
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.u32 $0, $1;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1
    )


# Loads from the ring. --------------------------------------------------------------------------------------


@gluon.constexpr_function
def load_shared_v4_asm(offset):
    return ptx(
        "word*4 address",
        ".reg .b32 a;", "mov.u32 a, global_smem;", "add.u32 a, a, $address;",
        f"ld.shared.v4.b32 {{$word0,$word1,$word2,$word3}}, [a+{offset}];",
    )  # fmt: skip


@gluon.jit
def load_shared_v4(address, OFFSET: gl.constexpr):
    """Read four words of each thread, 16 bytes, at `address + OFFSET`."""
    return gl.inline_asm_elementwise(
        load_shared_v4_asm(OFFSET), "=r,=r,=r,=r,r", [address],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip


@gluon.constexpr_function
def load_shared_v2_asm(offset):
    return ptx(
        "first second address",
        ".reg .b32 a;", "mov.u32 a, global_smem;", "add.u32 a, a, $address;",
        f"ld.shared.v2.b32 {{$first,$second}}, [a+{offset}];",
    )  # fmt: skip


@gluon.jit
def load_shared_v2(address, OFFSET: gl.constexpr):
    """Read two words of each thread, 8 bytes, at `address + OFFSET`."""
    return gl.inline_asm_elementwise(
        load_shared_v2_asm(OFFSET), "=r,=r,r", [address],
        dtype=(gl.int32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip


@gluon.constexpr_function
def load_shared_asm(offset):
    return ptx(
        "word address",
        ".reg .b32 a;", "mov.u32 a, global_smem;", "add.u32 a, a, $address;",
        f"ld.shared.b32 $word, [a+{offset}];",
    )  # fmt: skip


@gluon.jit
def load_shared(address, OFFSET: gl.constexpr):
    return gl.inline_asm_elementwise(
        load_shared_asm(OFFSET), "=r,r", [address], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.constexpr_function
def load_shared_pair_asm(offset, step):
    return ptx(
        "first second address",
        ".reg .b32 a;", "mov.u32 a, global_smem;", "add.u32 a, a, $address;",
        f"ld.shared.b32 $first, [a+{offset}];", f"ld.shared.b32 $second, [a+{offset + step}];",
    )  # fmt: skip


@gluon.jit
def load_shared_pair(address, OFFSET: gl.constexpr, STEP: gl.constexpr):
    """Read the words at `address + OFFSET` and `STEP` bytes further on."""
    return gl.inline_asm_elementwise(
        load_shared_pair_asm(OFFSET, STEP), "=r,=r,r", [address],
        dtype=(gl.int32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip


# Semaphores in global memory. ------------------------------------------------------------------------------


@gluon.constexpr_function
def elected_asm(of, instruction):
    """Return PTX that runs `instruction` in thread 0 ("tid.x") or lane 0 ("laneid")."""
    return ptx(
        "unused semaphore",
        ".reg .pred p;", ".reg .b32 t;", f"mov.u32 t, %{of};", "setp.eq.u32 p, t, 0;",
        f"@p {instruction};", "mov.u32 $unused, 0;",
    )  # fmt: skip


@gluon.jit
def semaphore_release(semaphore, OF: gl.constexpr):
    """Let the first thread or lane add one, with release at GPU scope."""
    gl.inline_asm_elementwise(
        elected_asm(OF, "red.release.gpu.global.add.u32 [$semaphore], 1"), "=r,l", [semaphore.to(gl.int64)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.constexpr_function
def semaphore_acquire_asm():
    return ptx(
        "unused semaphore wanted",
        ".reg .pred p;", ".reg .b32 v;", "again:", "ld.acquire.gpu.global.b32 v, [$semaphore];",
        "setp.lt.u32 p, v, $wanted;", "@p bra again;", "mov.u32 $unused, 0;",
    )  # fmt: skip


@gluon.jit
def semaphore_acquire(semaphore, wanted):
    """Spin, with acquire at GPU scope, until the semaphore has reached `wanted`."""
    gl.inline_asm_elementwise(
        semaphore_acquire_asm(), "=r,l,r", [semaphore.to(gl.int64), wanted],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def semaphore_reset(semaphore, OF: gl.constexpr):
    gl.inline_asm_elementwise(
        elected_asm(OF, "st.global.b32 [$semaphore], 0"), "=r,l", [semaphore.to(gl.int64)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


# Partial sums. ---------------------------------------------------------------------------------------------


@gluon.jit
def opaque_address(pointer):
    """Return a pointer as an int64 that hides its origin, so that the compiler does not move computations
    with it out of loops.
    """
    return gl.inline_asm_elementwise(
        "mov.b64 $0, $1;", "=l,l", [pointer.to(gl.int64)], dtype=gl.int64, is_pure=False, pack=1
    )


@gluon.constexpr_function
def store_fp32_asm(offset):
    return ptx(
        "unused*4 sum*4 address*4",
        f"st.global.v4.b32 [$address0+{offset}], {{$sum0,$sum1,$sum2,$sum3}};", *zero("unused", 4),
    )  # fmt: skip


@gluon.jit
def store_fp32(sums, address, OFFSET: gl.constexpr):
    """Store a thread's four sums, 16 bytes, to `address + OFFSET` in global memory."""
    gl.inline_asm_elementwise(
        store_fp32_asm(OFFSET), "=r,=r,=r,=r,r,r,r,r,l,l,l,l", [sums, address],
        dtype=gl.int32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.constexpr_function
def load_fp32_asm(offset):
    zeros = [f"mov.b32 $sum{i}, 0;" for i in range(4)]
    return ptx(
        "sum*4 address*4 wanted*4",
        ".reg .pred p;", "setp.ne.b32 p, $wanted0, 0;", *zeros,
        f"@p ld.global.cg.v4.b32 {{$sum0,$sum1,$sum2,$sum3}}, [$address0+{offset}];",
    )  # fmt: skip


@gluon.jit
def load_fp32(address, wanted, OFFSET: gl.constexpr):
    """Load four sums of another CTA from `address + OFFSET`, bypassing L1; return zeros if not `wanted`."""
    return gl.inline_asm_elementwise(
        load_fp32_asm(OFFSET), "=r,=r,=r,=r,l,l,l,l,r,r,r,r", [address, wanted],
        dtype=gl.float32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.constexpr_function
def max_abs_asm():
    results = [f"mov.f32 $result{i}, a;" for i in range(4)]
    return ptx(
        "result*4 sum*4 before*4",
        ".reg .f32 a, b;", "abs.f32 a, $sum0;", "abs.f32 b, $sum1;", "max.f32 a, a, b;",
        "abs.f32 b, $sum2;", "max.f32 a, a, b;", "abs.f32 b, $sum3;", "max.f32 a, a, b;",
        "max.f32 a, a, $before0;", *results,
    )  # fmt: skip


@gluon.jit
def max_abs(sums, before):
    """Return the greatest magnitude of a thread's four sums and `before`, repeated four times."""
    return gl.inline_asm_elementwise(
        max_abs_asm(), "=f,=f,=f,=f,f,f,f,f,f,f,f,f", [sums, before],
        dtype=gl.float32, is_pure=True, pack=4,
    )  # fmt: skip


@gluon.constexpr_function
def store_fp16_asm(offset):
    sums = [f"$low{i}" for i in range(4)] + [f"$high{i}" for i in range(4)]
    halves = []
    for i in range(4):
        halves += [f"mul.f32 a, {sums[2 * i]}, $scale0;", f"mul.f32 b, {sums[2 * i + 1]}, $scale0;"]
        halves.append(f"cvt.rn.f16x2.f32 h{i}, b, a;")
    store = f"st.global.v4.b32 [$address0+{offset}], {{h0,h1,h2,h3}};"
    return ptx(
        "unused*4 low*4 high*4 scale*4 address*4",
        ".reg .f32 a, b;", ".reg .b32 h<4>;", *halves, store, *zero("unused", 4),
    )  # fmt: skip


@gluon.jit
def store_fp16(low, high, scale, address, OFFSET: gl.constexpr):
    """Store a thread's eight sums times `scale`, in fp16, 16 bytes, to `address + OFFSET`."""
    gl.inline_asm_elementwise(
        store_fp16_asm(OFFSET), "=r,=r,=r,=r,f,f,f,f,f,f,f,f,f,f,f,f,l,l,l,l", [low, high, scale, address],
        dtype=gl.int32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.constexpr_function
def store_scale_asm(offset):
    return ptx(
        "unused*4 scale*4 address*4", f"st.global.f32 [$address0+{offset}], $scale0;", *zero("unused", 4)
    )


@gluon.jit
def store_scale(scale, address, OFFSET: gl.constexpr):
    """Store a thread's one fp32 scale to `address + OFFSET`."""
    gl.inline_asm_elementwise(
        store_scale_asm(OFFSET), "=r,=r,=r,=r,f,f,f,f,l,l,l,l", [scale, address],
        dtype=gl.int32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.constexpr_function
def load_lines(what, offset, shared):
    """Return PTX that loads from `$address0 + offset` in shared memory or, bypassing L1, in global memory."""
    if shared:
        base = ("mov.u32 p, global_smem;", "add.u32 p, p, $address0;")
        return (*base, f"ld.shared.{what}, [p+{offset}];")
    return (f"ld.global.cg.{what}, [$address0+{offset}];",)


@gluon.constexpr_function
def load_constraints(results, shared):
    return ",".join(["=f"] * results + ["r" if shared else "l"] * 4)


@gluon.constexpr_function
def load_fp16_asm(offset, shared):
    sums = [f"$low{i}" for i in range(4)] + [f"$high{i}" for i in range(4)]
    parts = [
        f"mov.b32 {{a, b}}, h{i}; cvt.f32.f16 {sums[2 * i]}, a; cvt.f32.f16 {sums[2 * i + 1]}, b;"
        for i in range(4)
    ]
    loads = load_lines("v4.b32 {h0,h1,h2,h3}", offset, shared)
    return ptx("low*4 high*4 address*4", ".reg .b16 a, b;", ".reg .b32 p, h<4>;", *loads, *parts)


@gluon.jit
def load_fp16(address, OFFSET: gl.constexpr, SHARED: gl.constexpr):
    """Load the sums that `store_fp16` stored, as two times four fp32 sums, from global or shared memory."""
    return gl.inline_asm_elementwise(
        load_fp16_asm(OFFSET, SHARED), load_constraints(8, SHARED), [address],
        dtype=(gl.float32, gl.float32), is_pure=False, pack=4,
    )  # fmt: skip


@gluon.constexpr_function
def load_scale_asm(offset, shared):
    copies = [f"mov.f32 $scale{i}, a;" for i in range(4)]
    loads = load_lines("f32 a", offset, shared)
    return ptx("scale*4 address*4", ".reg .f32 a;", ".reg .b32 p;", *loads, *copies)


@gluon.jit
def load_scale(address, OFFSET: gl.constexpr, SHARED: gl.constexpr):
    """Load the scale that `store_scale` stored; return it repeated four times."""
    return gl.inline_asm_elementwise(
        load_scale_asm(OFFSET, SHARED), load_constraints(4, SHARED), [address],
        dtype=gl.float32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.constexpr_function
def bulk_load_asm(sums_bytes, scales_bytes, full, words):
    copy = "@p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    return ptx(
        "unused sums scales x_slot words_slot barrier",
        ".reg .pred p;", ".reg .b32 a, b, c, l;", "mov.u32 l, %laneid;", "setp.eq.u32 p, l, 0;",
        "mov.u32 l, global_smem;", "add.u32 a, l, $x_slot;", "add.u32 b, l, $words_slot;",
        f"add.u32 b, b, {words};", "add.u32 c, l, $barrier;", f"add.u32 c, c, {full};",
        "@p fence.proxy.async;",
        f"@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [c], {sums_bytes + scales_bytes};",
        f"{copy} [a], [$sums], {sums_bytes}, [c];", f"{copy} [b], [$scales], {scales_bytes}, [c];",
        "mov.u32 $unused, 0;",
    )  # fmt: skip


@gluon.jit
def bulk_load(sums, scales, slot, SUMS_BYTES: gl.constexpr, SCALES_BYTES: gl.constexpr, t, smem):
    """Let lane 0 start bulk copies of partial sums into a slot's activations, and of scales into its words.

    The copies complete on the slot's full mbarrier. A proxy fence is needed because other CTAs wrote the
    sums.
    """
    gl.inline_asm_elementwise(
        bulk_load_asm(SUMS_BYTES, SCALES_BYTES, smem.FULL, smem.WORDS), "=r,l,l,r,r,r",
        [sums, scales, slot * (t.BM * t.K_TILES * 128), slot * smem.WORD_BYTES, slot * 8],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


# Stores of y. ----------------------------------------------------------------------------------------------


@gluon.constexpr_function
def store_y_asm(half):
    kind = "f16x2" if half else "bf16x2"
    return ptx(
        "unused*4 sum*4 address*4 inside*4",
        ".reg .pred p, q;", ".reg .b32 s, t, u;",
        f"cvt.rn.{kind}.f32 t, $sum1, $sum0;", "movmatrix.sync.aligned.m8n8.trans.b16 t, t;",
        f"cvt.rn.{kind}.f32 u, $sum3, $sum2;", "movmatrix.sync.aligned.m8n8.trans.b16 u, u;",
        "mov.u32 s, %laneid;", "and.b32 s, s, 1;", "setp.ne.u32 q, s, 0;", "selp.b32 s, t, u, q;",
        "shfl.sync.bfly.b32 s, s, 1, 31, 0xffffffff;", "@!q mov.b32 u, s;", "@q mov.b32 t, s;",
        "setp.ne.b32 p, $inside0, 0;", "@p st.global.v2.b32 [$address0], {t,u};", *zero("unused", 4),
    )  # fmt: skip


@gluon.jit
def store_transposed(sums, address, inside, HALF: gl.constexpr):
    """Exchange sums within a warp: a thread gives four sums, two neighbours in M of two rows of w, and gets
    four neighbours in a row of y.

    The sums are transposed within the warp in two steps: 8x8 blocks by movmatrix, then between neighbouring
    lanes, so that four lanes fill a 32-byte sector.
    """
    gl.inline_asm_elementwise(
        store_y_asm(HALF), "=r,=r,=r,=r,r,r,r,r,l,l,l,l,r,r,r,r", [sums, address, inside],
        dtype=gl.int32, is_pure=False, pack=4,
    )  # fmt: skip
