//! The C face of `bridge/*.cpp`, declared once. Every `i32` is an outcome, see `error.rs`.

use std::ffi::{c_char, c_void};
use std::mem::offset_of;

/// `at::Tensor`, as tch hands it out.
pub(crate) type RawTensor = c_void;
pub(crate) type RawArena = c_void;
pub(crate) type RawStay = c_void;
pub(crate) type RawEvent = c_void;
pub(crate) type RawGraph = c_void;
pub(crate) type RawGenerator = c_void;
pub(crate) type RawSplit = c_void;
pub(crate) type RawWatches = c_void;
pub(crate) type RawKnownLeaves = c_void;
/// An array of tensors, whose length is told beside it.
type Tensors = *const *const RawTensor;
type Message = *mut *mut c_char;

/// Where each field of a mirrored struct lies, and how large the whole is: the numbers that
/// `bridge/mirrored.h` and `cuda/functions.h` have too, so that neither side can be changed alone.
macro_rules! mirrored {
    ($name:ident, $size:literal bytes, $($field:ident: $offset:literal),+) => {
        const _: () = {
            $(assert!(offset_of!($name, $field) == $offset, "a field is elsewhere in C++");)+
            assert!(size_of::<$name>() == $size, "the struct is of another size in C++");
        };
    };
}

#[repr(C)]
#[derive(Default)]
pub(crate) struct RawMemory {
    pub(crate) current: i64,
    pub(crate) peak: i64,
    pub(crate) reserved: i64,
    pub(crate) retries: i64,
    pub(crate) refusals: i64,
    pub(crate) free: i64,
    pub(crate) total: i64,
}
mirrored!(
    RawMemory, 56 bytes,
    current: 0, peak: 8, reserved: 16, retries: 24, refusals: 32, free: 40, total: 48
);

/// An allocation that an arena refused. No limit is -1; the arena's name is ours to free.
#[repr(C)]
pub(crate) struct RawRefusal {
    pub(crate) asked: i64,
    pub(crate) in_use: i64,
    pub(crate) limit: i64,
    pub(crate) arena: *mut c_char,
}
mirrored!(RawRefusal, 32 bytes, asked: 0, in_use: 8, limit: 16, arena: 24);

#[repr(C)]
pub(crate) struct RawSgd {
    pub(crate) learning_rate: f64,
    pub(crate) momentum: f64,
    pub(crate) dampening: f64,
    pub(crate) weight_decay: f64,
    pub(crate) nesterov: bool,
    pub(crate) first: bool,
}
mirrored!(
    RawSgd, 40 bytes,
    learning_rate: 0, momentum: 8, dampening: 16, weight_decay: 24, nesterov: 32, first: 33
);

#[repr(C)]
pub(crate) struct RawAdam {
    pub(crate) learning_rate: f64,
    pub(crate) beta1: f64,
    pub(crate) beta2: f64,
    pub(crate) eps: f64,
    pub(crate) weight_decay: f64,
    pub(crate) amsgrad: bool,
    pub(crate) decoupled: bool,
}
mirrored!(
    RawAdam, 48 bytes,
    learning_rate: 0, beta1: 8, beta2: 16, eps: 24, weight_decay: 32, amsgrad: 40, decoupled: 41
);

/// A BatchNorm and its input; what it has not is null.
#[repr(C)]
pub(crate) struct RawNorm {
    pub(crate) x: *const RawTensor,
    pub(crate) weight: *const RawTensor,
    pub(crate) bias: *const RawTensor,
    pub(crate) running_mean: *const RawTensor,
    pub(crate) running_variance: *const RawTensor,
    pub(crate) momentum: f64,
    pub(crate) eps: f64,
    pub(crate) training: bool,
}
mirrored!(
    RawNorm, 64 bytes,
    x: 0, weight: 8, bias: 16, running_mean: 24, running_variance: 32, momentum: 40, eps: 48,
    training: 56
);

/// What is added before a ReLU: a tensor, or the output of another BatchNorm; or neither.
#[repr(C)]
pub(crate) struct RawAddend {
    pub(crate) tensor: *const RawTensor,
    pub(crate) norm: *const RawNorm,
}
mirrored!(RawAddend, 16 bytes, tensor: 0, norm: 8);

/// What `cuda/*.cpp` can do, once it is loaded.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct RawCudaFunctions {
    pub(crate) begin: unsafe extern "C" fn(i32, *const u64, *mut *mut RawGraph, Message) -> i32,
    pub(crate) end: unsafe extern "C" fn(*mut RawGraph, bool, *mut u64, Message) -> i32,
    pub(crate) replay: unsafe extern "C" fn(*mut RawGraph, Message) -> i32,
    pub(crate) drop: unsafe extern "C" fn(*mut RawGraph),
    pub(crate) memory_share: unsafe extern "C" fn(i32, *mut f64, Message) -> i32,
    pub(crate) set_memory_share: unsafe extern "C" fn(i32, f64, Message) -> i32,
}
mirrored!(
    RawCudaFunctions, 48 bytes,
    begin: 0, end: 8, replay: 16, drop: 24, memory_share: 32, set_memory_share: 40
);

unsafe extern "C" {
    pub(crate) fn brimful_load_cuda_object(
        bytes: *const u8,
        length: usize,
        out: *mut *const RawCudaFunctions,
        message: Message,
    ) -> i32;
    pub(crate) fn brimful_free_message(message: *mut c_char);
    pub(crate) fn brimful_load_cuda(message: Message) -> i32;
    pub(crate) fn brimful_cuda_driver(version: *mut i32, message: Message) -> i32;
    pub(crate) fn brimful_cuda_name(d: i32, out: *mut *mut c_char, message: Message) -> i32;
    pub(crate) fn brimful_allow_tf32(allowed: bool, message: Message) -> i32;
    pub(crate) fn brimful_allows_tf32(allowed: *mut bool, message: Message) -> i32;
    pub(crate) fn brimful_show_config() -> *mut c_char;
    pub(crate) fn brimful_cpu_capability() -> *mut c_char;
    pub(crate) fn brimful_library_path() -> *mut c_char;

    pub(crate) fn brimful_kernels_enabled() -> bool;
    pub(crate) fn brimful_kernels_enable(on: bool);
    pub(crate) fn brimful_kernels_refusals() -> *mut c_char;
    pub(crate) fn brimful_kernels_describe(d: i32, out: *mut *mut c_char, m: Message) -> i32;
    pub(crate) fn brimful_kernels_pretend(
        multiprocessors: i32,
        shared_bytes: u64,
        message: Message,
    ) -> i32;
    pub(crate) fn brimful_kernels_compile(
        source: *const c_char,
        defines: *const c_char,
        architecture: i32,
        from_cache: *mut bool,
        bytes: *mut usize,
        message: Message,
    ) -> i32;
    pub(crate) fn brimful_kernels_compile_ahead(
        source: *const c_char,
        defines: *const c_char,
        architecture: i32,
        message: Message,
    ) -> i32;

    pub(crate) fn brimful_batch_norm(
        norm: *const RawNorm,
        addend: *const RawAddend,
        relu: bool,
        out: *mut *mut RawTensor,
        message: Message,
    ) -> i32;
    pub(crate) fn brimful_batch_norm_pool(
        norm: *const RawNorm,
        out: *mut *mut RawTensor,
        message: Message,
    ) -> i32;
    pub(crate) fn brimful_batch_norm_moments(
        x: *const RawTensor,
        mean: *mut *mut RawTensor,
        variance: *mut *mut RawTensor,
        message: Message,
    ) -> i32;
    pub(crate) fn brimful_second_use(
        tensor: *const RawTensor,
        out: *mut *mut RawTensor,
        message: Message,
    ) -> i32;

    pub(crate) fn brimful_arena_new(name: *const c_char) -> *mut RawArena;
    pub(crate) fn brimful_arena_drop(arena: *mut RawArena);
    pub(crate) fn brimful_arena_enter(arena: *mut RawArena) -> *mut RawStay;
    pub(crate) fn brimful_arena_leave(stay: *mut RawStay);
    pub(crate) fn brimful_arena_set_limit(arena: *mut RawArena, limit: i64);
    pub(crate) fn brimful_arena_limit(arena: *const RawArena) -> i64;
    pub(crate) fn brimful_arena_current(arena: *const RawArena) -> i64;
    pub(crate) fn brimful_arena_peak(arena: *const RawArena) -> i64;
    pub(crate) fn brimful_arena_allocations(arena: *const RawArena) -> i64;
    pub(crate) fn brimful_arena_reset_peak(arena: *mut RawArena);
    pub(crate) fn brimful_arena_refusals(arena: *const RawArena) -> i64;
    pub(crate) fn brimful_arena_refusal(text: *const c_char, out: *mut RawRefusal) -> bool;
    pub(crate) fn brimful_arena_fail(arena: *mut RawArena, n: i64, count: i64);

    pub(crate) fn brimful_backward(
        roots: *const *const RawTensor,
        gradients: *const *const RawTensor,
        count: usize,
        keep_graph: bool,
        known: *const RawKnownLeaves,
        ends: Tensors,
        end_count: usize,
        other: *mut *mut RawTensor,
        message: Message,
    ) -> i32;
    pub(crate) fn brimful_want_engine(wanted: bool) -> bool;
    pub(crate) fn brimful_watch(
        parameters: Tensors,
        count: usize,
        arrived: extern "C" fn(*mut c_void, usize),
        context: *mut c_void,
        watches: *mut *mut RawWatches,
        message: Message,
    ) -> i32;
    pub(crate) fn brimful_unwatch(watches: *mut RawWatches);
    pub(crate) fn brimful_known_leaves(out: *mut *mut RawKnownLeaves, message: Message) -> i32;
    pub(crate) fn brimful_know_leaves(
        known: *mut RawKnownLeaves,
        leaves: Tensors,
        count: usize,
        message: Message,
    ) -> i32;
    pub(crate) fn brimful_forget_leaves(known: *mut RawKnownLeaves);
    pub(crate) fn brimful_other_leaf(
        roots: Tensors,
        count: usize,
        known: *const RawKnownLeaves,
        out: *mut *mut RawTensor,
        message: Message,
    ) -> i32;
    pub(crate) fn brimful_first_sparse_gradient(
        parameters: *const *const RawTensor,
        count: usize,
    ) -> usize;
    pub(crate) fn brimful_offer_sums(
        parameters: *const *const RawTensor,
        sums: *const *mut RawTensor,
        count: usize,
        message: Message,
    ) -> i32;
    pub(crate) fn brimful_settle_sums(
        parameters: *const *const RawTensor,
        count: usize,
        message: Message,
    ) -> i32;
    pub(crate) fn brimful_withdraw_sums(
        parameters: *const *const RawTensor,
        sums: *mut *mut RawTensor,
        count: usize,
    );
    pub(crate) fn brimful_collect_gradients(
        parameters: *const *const RawTensor,
        sums: *mut *mut RawTensor,
        count: usize,
        piece_bytes: i64,
        message: Message,
    ) -> i32;
    pub(crate) fn brimful_is_same(one: *const RawTensor, other: *const RawTensor) -> bool;
    pub(crate) fn brimful_count_change(tensor: *const RawTensor);
    pub(crate) fn brimful_set_gradient(
        tensor: *mut RawTensor,
        gradient: *const RawTensor,
        message: Message,
    ) -> i32;

    pub(crate) fn brimful_device_memory(d: i32, out: *mut RawMemory, message: Message) -> i32;
    pub(crate) fn brimful_reset_peak(device: i32, message: Message) -> i32;
    pub(crate) fn brimful_empty_cache(device: i32, message: Message) -> i32;

    pub(crate) fn brimful_laid_out(
        tensor: *const RawTensor,
        channels_last: bool,
        out: *mut *mut RawTensor,
        message: Message,
    ) -> i32;
    pub(crate) fn brimful_lay_out(t: *mut RawTensor, channels_last: bool, m: Message) -> i32;

    pub(crate) fn brimful_meta_enter(on: bool) -> bool;

    pub(crate) fn brimful_generator_state(
        device: i32,
        out: *mut *mut RawTensor,
        message: Message,
    ) -> i32;
    pub(crate) fn brimful_seed_generator(device: i32, seed: u64, message: Message) -> i32;
    pub(crate) fn brimful_set_generator_state(
        device: i32,
        state: *const RawTensor,
        message: Message,
    ) -> i32;

    pub(crate) fn brimful_own_generator_enter(own: *mut *mut RawGenerator, message: Message)
    -> i32;
    pub(crate) fn brimful_own_generator_seed(own: *mut RawGenerator, seed: u64);
    pub(crate) fn brimful_own_generator_leave(own: *mut RawGenerator);

    pub(crate) fn brimful_split_backward(
        roots: Tensors,
        count: usize,
        inputs: Tensors,
        input_count: usize,
        known: *const RawKnownLeaves,
        split: *mut *mut RawSplit,
        other: *mut *mut RawTensor,
        message: Message,
    ) -> i32;
    pub(crate) fn brimful_split_input_half(
        split: *mut RawSplit,
        roots: Tensors,
        gradients: Tensors,
        count: usize,
        last: bool,
        out: *mut *mut RawTensor,
        message: Message,
    ) -> i32;
    pub(crate) fn brimful_split_weight_half(
        split: *mut RawSplit,
        group: usize,
        message: Message,
    ) -> i32;
    pub(crate) fn brimful_split_weight_gradients(
        split: *mut RawSplit,
        group: usize,
        leaves: Tensors,
        count: usize,
        out: *mut *mut RawTensor,
        message: Message,
    ) -> i32;
    pub(crate) fn brimful_split_unknown(split: *const RawSplit) -> *mut c_char;
    pub(crate) fn brimful_split_free(split: *mut RawSplit);

    pub(crate) fn brimful_stream_from_pool(device: i32, id: *mut i64, message: Message) -> i32;
    pub(crate) fn brimful_stream_urgent(device: i32, id: *mut i64, message: Message) -> i32;
    pub(crate) fn brimful_stream_beside(device: i32, id: *mut i64, message: Message) -> i32;
    pub(crate) fn brimful_stream_current(device: i32, id: *mut i64, message: Message) -> i32;
    pub(crate) fn brimful_stream_common(device: i32, id: *mut i64, message: Message) -> i32;
    pub(crate) fn brimful_stream_enter(d: i32, id: i64, last: *mut i64, message: Message) -> i32;
    pub(crate) fn brimful_stream_synchronize(device: i32, id: i64, message: Message) -> i32;
    pub(crate) fn brimful_device_synchronize(device: i32, message: Message) -> i32;
    pub(crate) fn brimful_record_stream(
        tensor: *const RawTensor,
        device: i32,
        id: i64,
        message: Message,
    ) -> i32;
    pub(crate) fn brimful_host_bytes(
        bytes: usize,
        alignment: usize,
        out: *mut *mut RawTensor,
        message: Message,
    ) -> i32;
    pub(crate) fn brimful_lock_pages(
        memory: *mut std::ffi::c_void,
        bytes: usize,
        device: i32,
        message: Message,
    ) -> i32;
    pub(crate) fn brimful_unlock_pages(memory: *mut std::ffi::c_void, message: Message) -> i32;
    pub(crate) fn brimful_lookers(
        tensor: *const RawTensor,
        out: *mut usize,
        message: Message,
    ) -> i32;
    pub(crate) fn brimful_pin(
        tensor: *const RawTensor,
        out: *mut *mut RawTensor,
        message: Message,
    ) -> i32;
    pub(crate) fn brimful_room_for(
        tensor: *const RawTensor,
        page_locked: bool,
        keeps_order: bool,
        out: *mut *mut RawTensor,
        message: Message,
    ) -> i32;
    pub(crate) fn brimful_copy(
        into: *mut RawTensor,
        from: *const RawTensor,
        message: Message,
    ) -> i32;
    pub(crate) fn brimful_send(
        tensor: *const RawTensor,
        device: i32,
        out: *mut *mut RawTensor,
        message: Message,
    ) -> i32;

    pub(crate) fn brimful_event_new(device: i32, out: *mut *mut RawEvent, message: Message) -> i32;
    pub(crate) fn brimful_event_drop(event: *mut RawEvent);
    pub(crate) fn brimful_event_record(e: *mut RawEvent, d: i32, stream: i64, m: Message) -> i32;
    pub(crate) fn brimful_event_block(e: *const RawEvent, d: i32, stream: i64, m: Message) -> i32;
    pub(crate) fn brimful_event_query(e: *const RawEvent, reached: *mut bool, m: Message) -> i32;
    pub(crate) fn brimful_event_synchronize(event: *const RawEvent, message: Message) -> i32;
    pub(crate) fn brimful_event_elapsed(
        from: *const RawEvent,
        to: *const RawEvent,
        milliseconds: *mut f64,
        message: Message,
    ) -> i32;

    pub(crate) fn brimful_foreach_scale(t: Tensors, n: usize, factor: f64, m: Message) -> i32;
    pub(crate) fn brimful_foreach_scale_by(
        tensors: Tensors,
        count: usize,
        factor: *const RawTensor,
        message: Message,
    ) -> i32;
    pub(crate) fn brimful_foreach_add(
        into: Tensors,
        what: Tensors,
        count: usize,
        factor: f64,
        message: Message,
    ) -> i32;
    pub(crate) fn brimful_foreach_copy(to: Tensors, from: Tensors, n: usize, m: Message) -> i32;
    pub(crate) fn brimful_foreach_zero(tensors: Tensors, count: usize, message: Message) -> i32;
    pub(crate) fn brimful_foreach_norm(
        tensors: Tensors,
        count: usize,
        out: *mut *mut RawTensor,
        message: Message,
    ) -> i32;

    pub(crate) fn brimful_norm(
        x: *const RawTensor,
        residual: *const RawTensor,
        weight: *const RawTensor,
        bias: *const RawTensor,
        eps: f64,
        rms: bool,
        sum: *mut *mut RawTensor,
        out: *mut *mut RawTensor,
        message: Message,
    ) -> i32;
    pub(crate) fn brimful_projections(
        x: *const RawTensor,
        weights: *const *const RawTensor,
        biases: *const *const RawTensor,
        count: usize,
        inputs_first: bool,
        joined: bool,
        out: *mut *mut RawTensor,
        message: Message,
    ) -> i32;
    pub(crate) fn brimful_embedding(
        table: *const RawTensor,
        places: *const RawTensor,
        out: *mut *mut RawTensor,
        message: Message,
    ) -> i32;
    pub(crate) fn brimful_rotary(
        x: *const RawTensor,
        cos: *const RawTensor,
        sin: *const RawTensor,
        out: *mut *mut RawTensor,
        message: Message,
    ) -> i32;
    pub(crate) fn brimful_activation(
        x: *const RawTensor,
        bias: *const RawTensor,
        function: i32,
        out: *mut *mut RawTensor,
        message: Message,
    ) -> i32;
    pub(crate) fn brimful_linear_cross_entropy(
        hidden: *const RawTensor,
        weight: *const RawTensor,
        bias: *const RawTensor,
        targets: *const RawTensor,
        class_weights: *const RawTensor,
        smoothing: f64,
        ignored: i64,
        chunk_bytes: i64,
        loss: *mut *mut RawTensor,
        divisor: *mut *mut RawTensor,
        message: Message,
    ) -> i32;

    pub(crate) fn brimful_touches_begin(list: *mut *mut c_void, message: Message) -> i32;
    pub(crate) fn brimful_any_is_left(tensors: Tensors, count: usize) -> bool;
    pub(crate) fn brimful_touches_exchange(list: *mut c_void) -> *mut c_void;
    pub(crate) fn brimful_touches_draw_on_host(list: *const c_void) -> bool;
    pub(crate) fn brimful_touches_end(
        list: *mut c_void,
        ran: extern "C" fn(*mut c_void, *const c_char),
        found: extern "C" fn(*mut c_void, *mut RawTensor, bool),
        context: *mut c_void,
        message: Message,
    ) -> i32;

    pub(crate) fn brimful_fits(parameter: *const RawTensor, other: *const RawTensor) -> bool;
    pub(crate) fn brimful_fused_sgd(
        parameters: Tensors,
        gradients: Tensors,
        buffers: Tensors,
        count: usize,
        options: *const RawSgd,
        rate: *const RawTensor,
        message: Message,
    ) -> i32;
    pub(crate) fn brimful_fused_adam(
        parameters: Tensors,
        gradients: Tensors,
        averages: Tensors,
        squares: Tensors,
        maxima: Tensors,
        steps: Tensors,
        count: usize,
        options: *const RawAdam,
        rate: *const RawTensor,
        message: Message,
    ) -> i32;
    pub(crate) fn brimful_adam_beside(
        now: Tensors,
        gradient: *const RawTensor,
        next: Tensors,
        options: *const RawAdam,
        step: f64,
        done: *mut bool,
        message: Message,
    ) -> i32;
}
