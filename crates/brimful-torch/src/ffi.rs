//! C interface of `bridge/*.cpp`, declared once.

use std::ffi::{c_char, c_int, c_void};
use std::mem::{self, offset_of};

use crate::error::{TorchError, call};

/// `at::Tensor`, as tch exposes it.
pub(crate) type RawTensor = c_void;
pub(crate) type RawArena = c_void;
pub(crate) type RawStay = c_void;
pub(crate) type RawEvent = c_void;
pub(crate) type RawGraph = c_void;
pub(crate) type RawGenerator = c_void;
pub(crate) type RawSplit = c_void;
pub(crate) type RawWatches = c_void;
pub(crate) type RawKnownLeaves = c_void;
pub(crate) type RawTouches = c_void;
pub(crate) type RawFrozen = c_void;
/// Borrowed tensor.
type Lent = *const RawTensor;
/// Tensor created by the bridge and owned by the caller.
type Made = *mut RawTensor;
/// Array of tensors; its length is passed beside it.
type Tensors = *const *const RawTensor;
type Message = *mut *mut c_char;

/// Declares structs with the offset of each field and the total size. `bridge/mirrored.h` asserts the same
/// numbers, so that neither side can change alone.
macro_rules! mirrored {
    ($($(#[$meta:meta])* $name:ident, $size:literal bytes: {
        $($field:ident: $type:ty = $offset:literal,)+
    })+) => {$(
        #[repr(C)]
        $(#[$meta])*
        pub(crate) struct $name {
            $(pub(crate) $field: $type,)+
        }
        const _: () = {
            $(assert!(offset_of!($name, $field) == $offset, "a field is elsewhere in C++");)+
            assert!(size_of::<$name>() == $size, "the struct is of another size in C++");
        };
    )+};
}

mirrored! {
    /// Parameter with its gradient and state; absent tensors are null.
    RawUpdate, 88 bytes: {
        parameter: Lent = 0,
        gradient: Lent = 8,
        master: Lent = 16,
        step: Lent = 24,
        moments: [Lent; 3] = 32,
        scales: [Lent; 3] = 56,
        first: bool = 80,
    }

    RawUpdateOptions, 48 bytes: {
        rate: f64 = 0,
        weight_decay: f64 = 8,
        eps: f64 = 16,
        beta1: f64 = 24,
        beta2: f64 = 32,
        rule: i32 = 40,
        nesterov: bool = 44,
        decoupled: bool = 45,
    }

    RawMuon, 40 bytes: {
        a: f64 = 0,
        b: f64 = 8,
        c: f64 = 16,
        eps: f64 = 24,
        steps: i64 = 32,
    }

    RawAdafactor, 32 bytes: {
        beta2_decay: f64 = 0,
        eps1: f64 = 8,
        eps2: f64 = 16,
        threshold: f64 = 24,
    }

    /// BatchNorm and its input; absent tensors are null.
    RawNorm, 64 bytes: {
        x: Lent = 0,
        weight: Lent = 8,
        bias: Lent = 16,
        running_mean: Lent = 24,
        running_variance: Lent = 32,
        momentum: f64 = 40,
        eps: f64 = 48,
        training: bool = 56,
    }
}

/// Declares bridge functions that may fail. In C++ each takes up to two more arguments: the out-pointer for the
/// answer, if any, and the one for the error message. It returns a status code, see `error.rs`.
macro_rules! guarded {
    ($(fn $name:ident $arguments:tt $(-> $answer:ty)?;)+) => {
        $(guarded!(@ $name $arguments $(, $answer)?);)+
    };
    (@ $name:ident($($argument:ident: $type:ty),* $(,)?)) => {
        #[allow(clippy::too_many_arguments, reason = "as many as in C++")]
        pub(crate) unsafe fn $name($($argument: $type),*) -> Result<(), TorchError> {
            unsafe extern "C" {
                fn $name($($argument: $type,)* message: Message) -> i32;
            }
            // SAFETY: the caller vouches for the arguments; the message pointer is valid.
            call(|message| unsafe { $name($($argument,)* message) })
        }
    };
    (@ $name:ident($($argument:ident: $type:ty),* $(,)?), $answer:ty) => {
        #[allow(clippy::too_many_arguments, reason = "as many as in C++")]
        pub(crate) unsafe fn $name($($argument: $type),*) -> Result<$answer, TorchError> {
            guarded!(@ $name($($argument: $type,)* answer: *mut $answer));
            // SAFETY: answers are numbers and pointers, which may be zero.
            let mut answer: $answer = unsafe { mem::zeroed() };
            // SAFETY: the caller vouches for the arguments; the answer pointer is valid.
            unsafe { $name($($argument,)* &mut answer) }?;
            Ok(answer)
        }
    };
}

guarded! {
    fn brimful_load_cuda_object(bytes: *const u8, length: usize);
    fn brimful_graph_begin(device: i32, pool: *const u64) -> *mut RawGraph;
    fn brimful_graph_end(graph: *mut RawGraph, own_kernels: bool, pool: *mut u64);
    fn brimful_graph_replay(graph: *mut RawGraph);
    fn brimful_memory_share(device: i32) -> f64;
    fn brimful_set_memory_share(device: i32, share: f64);
    fn brimful_load_cuda();
    fn brimful_cuda_driver() -> i32;
    fn brimful_cuda_name(device: i32) -> *mut c_char;
    fn brimful_allow_tf32(allowed: bool);
    fn brimful_allows_tf32() -> bool;

    fn brimful_kernels_describe(device: i32) -> *mut c_char;
    fn brimful_kernels_pretend(multiprocessors: i32, shared_bytes: u64);
    fn brimful_kernels_pretend_failure(launches: i64) -> i64;
    fn brimful_kernels_fail_loads(after: i32, count: i32, error: i32);
    fn brimful_kernels_compile(
        source: *const c_char, defines: *const c_char, architecture: i32, from_cache: *mut bool,
        bytes: *mut usize,
    );
    fn brimful_kernels_compile_ahead(
        source: *const c_char, defines: *const c_char, architecture: i32,
    );

    fn brimful_batch_norm(
        norm: *const RawNorm, added: Lent, added_norm: *const RawNorm, relu: bool,
    ) -> Made;
    fn brimful_batch_norm_pool(norm: *const RawNorm) -> Made;
    fn brimful_batch_norm_moments(x: Lent) -> [Made; 2];
    fn brimful_second_use(tensor: Lent) -> Made;

    fn brimful_backward(
        roots: Tensors, gradients: Tensors, count: usize, keep_graph: bool,
        known: *const RawKnownLeaves, ends: Tensors, end_count: usize,
    ) -> Made;
    fn brimful_watch(
        parameters: Tensors, count: usize, arrived: extern "C" fn(*mut c_void, usize),
        context: *mut c_void,
    ) -> *mut RawWatches;
    fn brimful_known_leaves() -> *mut RawKnownLeaves;
    fn brimful_know_leaves(known: *mut RawKnownLeaves, leaves: Tensors, count: usize);
    fn brimful_other_leaf(roots: Tensors, count: usize, known: *const RawKnownLeaves) -> Made;
    fn brimful_offer_sums(parameters: Tensors, sums: *const Made, count: usize);
    fn brimful_settle_sums(parameters: Tensors, count: usize);
    fn brimful_own_gradients(parameters: Tensors, count: usize);
    fn brimful_collect_gradients(
        parameters: Tensors, sums: *mut Made, count: usize, piece_bytes: i64,
    );
    fn brimful_set_gradient(tensor: *mut RawTensor, gradient: Lent);

    fn brimful_device_memory(device: i32) -> [i64; 7];
    fn brimful_reset_peak(device: i32);
    fn brimful_empty_cache(device: i32);

    fn brimful_to_memory_format(tensor: Lent, channels_last: bool) -> Made;
    fn brimful_set_memory_format(tensor: *mut RawTensor, channels_last: bool);

    fn brimful_generator_state(device: i32) -> Made;
    fn brimful_seed_generator(device: i32, seed: u64);
    fn brimful_set_generator_state(device: i32, state: Lent);
    fn brimful_own_generator_enter() -> *mut RawGenerator;

    fn brimful_split_backward(
        roots: Tensors, count: usize, inputs: Tensors, input_count: usize,
        known: *const RawKnownLeaves, split: *mut *mut RawSplit,
    ) -> Made;
    fn brimful_split_input_gradients(
        split: *mut RawSplit, roots: Tensors, gradients: Tensors, count: usize, last: bool,
        out: *mut Made,
    );
    fn brimful_split_add_weight_gradients(split: *mut RawSplit, group: usize);
    fn brimful_split_weight_gradients(
        split: *mut RawSplit, group: usize, leaves: Tensors, count: usize, out: *mut Made,
    );

    fn brimful_stream_from_pool(device: i32) -> i64;
    fn brimful_stream_urgent(device: i32) -> i64;
    fn brimful_stream_beside(device: i32) -> i64;
    fn brimful_stream_current(device: i32) -> i64;
    fn brimful_stream_common(device: i32) -> i64;
    fn brimful_stream_enter(device: i32, id: i64) -> i64;
    fn brimful_stream_synchronize(device: i32, id: i64);
    fn brimful_device_synchronize(device: i32);
    fn brimful_record_stream(tensor: Lent, device: i32, id: i64);

    fn brimful_host_bytes(bytes: usize, alignment: usize) -> Made;
    fn brimful_lent_bytes(
        start: *mut c_void,
        bytes: usize,
        owner: *mut c_void,
        release: unsafe extern "C" fn(*mut c_void),
    ) -> Made;
    fn brimful_pin_pages(memory: *mut c_void, bytes: usize, device: i32);
    fn brimful_unpin_pages(memory: *mut c_void);
    fn brimful_pin(tensor: Lent) -> Made;
    fn brimful_empty_pinned(tensor: Lent, pinned: bool, keeps_order: bool) -> Made;
    fn brimful_copy(into: *mut RawTensor, from: Lent);
    fn brimful_send(tensor: Lent, device: i32) -> Made;

    fn brimful_event_new(device: i32) -> *mut RawEvent;
    fn brimful_event_record(event: *mut RawEvent, device: i32, stream: i64);
    fn brimful_event_block(event: *const RawEvent, device: i32, stream: i64);
    fn brimful_event_query(event: *const RawEvent) -> bool;
    fn brimful_event_synchronize(event: *const RawEvent);
    fn brimful_event_elapsed(from: *const RawEvent, to: *const RawEvent) -> f64;

    fn brimful_foreach_scale(tensors: Tensors, count: usize, factor: f64);
    fn brimful_foreach_scale_by(tensors: Tensors, count: usize, factor: Lent);
    fn brimful_foreach_add(into: Tensors, what: Tensors, count: usize, factor: f64);
    fn brimful_foreach_copy(into: Tensors, from: Tensors, count: usize);
    fn brimful_foreach_zero(tensors: Tensors, count: usize);
    fn brimful_foreach_norm(tensors: Tensors, count: usize, order: f64) -> Made;

    fn brimful_norm(
        x: Lent, residual: Lent, weight: Lent, bias: Lent, eps: f64, rms: bool, sum: *mut Made,
    ) -> Made;
    fn brimful_projections(
        x: Lent, weights: Tensors, biases: Tensors, count: usize, inputs_first: bool, joined: bool,
        out: *mut Made,
    );
    fn brimful_embedding(table: Lent, places: Lent) -> Made;
    fn brimful_rotary(x: Lent, cos: Lent, sin: Lent) -> Made;
    fn brimful_activation(x: Lent, bias: Lent, function: i32) -> Made;
    fn brimful_linear_cross_entropy(
        hidden: Lent, weight: Lent, bias: Lent, targets: Lent, class_weights: Lent, smoothing: f64,
        ignored: i64, chunk_bytes: i64,
    ) -> [Made; 2];

    fn brimful_touches_begin() -> *mut RawTouches;
    fn brimful_touches_end(
        list: *mut RawTouches, ran: extern "C" fn(*mut c_void, *const c_char),
        found: extern "C" fn(*mut c_void, *mut RawTensor, bool), context: *mut c_void,
        frozen: *mut *mut RawFrozen,
    ) -> bool;

    fn brimful_update(
        all: *const RawUpdate, count: usize, options: *const RawUpdateOptions, rate: Lent,
    );
    fn brimful_muon(
        update: *const RawUpdate, options: *const RawUpdateOptions, muon: *const RawMuon,
        scratch: Lent, rate: Lent,
    );
    fn brimful_adafactor(
        update: *const RawUpdate, options: *const RawUpdateOptions,
        factored: *const RawAdafactor, scratch: Lent, rate: Lent,
    );
    fn brimful_unpack_moment(moment: Lent, scales: Lent) -> Made;
    fn brimful_pack_moment(numbers: Lent, moment: Lent, scales: Lent);
}

unsafe extern "C" {
    /// Ends the process without destructors; from the C library.
    pub(crate) fn _exit(code: c_int) -> !;
    pub(crate) fn brimful_free_message(message: *mut c_char);
    pub(crate) fn brimful_show_config() -> *mut c_char;
    pub(crate) fn brimful_cpu_capability() -> *mut c_char;
    pub(crate) fn brimful_library_path() -> *mut c_char;

    pub(crate) fn brimful_graph_drop(graph: *mut RawGraph);
    pub(crate) fn brimful_kernels_enabled() -> bool;
    pub(crate) fn brimful_kernels_enable(on: bool);
    pub(crate) fn brimful_kernels_refusals() -> *mut c_char;

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
    pub(crate) fn brimful_arena_refusal(text: *const c_char, numbers: *mut [i64; 3])
    -> *mut c_char;
    pub(crate) fn brimful_arena_fail(arena: *mut RawArena, n: i64, count: i64);

    pub(crate) fn brimful_want_engine(wanted: bool) -> bool;
    pub(crate) fn brimful_unwatch(watches: *mut RawWatches);
    pub(crate) fn brimful_forget_leaves(known: *mut RawKnownLeaves);
    pub(crate) fn brimful_first_sparse_gradient(parameters: Tensors, count: usize) -> usize;
    pub(crate) fn brimful_withdraw_sums(parameters: Tensors, sums: *mut Made, count: usize);
    pub(crate) fn brimful_is_same(one: Lent, other: Lent) -> bool;
    pub(crate) fn brimful_count_change(tensor: Lent);
    pub(crate) fn brimful_split_unknown(split: *const RawSplit) -> *mut c_char;
    pub(crate) fn brimful_split_free(split: *mut RawSplit);

    pub(crate) fn brimful_meta_enter(on: bool) -> bool;
    pub(crate) fn brimful_own_generator_seed(own: *mut RawGenerator, seed: u64);
    pub(crate) fn brimful_own_generator_leave(own: *mut RawGenerator);
    pub(crate) fn brimful_event_drop(event: *mut RawEvent);
    pub(crate) fn brimful_fits(parameter: Lent, other: Lent) -> bool;

    pub(crate) fn brimful_any_is_left(tensors: Tensors, count: usize) -> bool;
    pub(crate) fn brimful_any_is_thawed(frozen: *const RawFrozen) -> bool;
    pub(crate) fn brimful_forget_frozen(frozen: *mut RawFrozen);
    pub(crate) fn brimful_touches_exchange(list: *mut RawTouches) -> *mut RawTouches;
}
