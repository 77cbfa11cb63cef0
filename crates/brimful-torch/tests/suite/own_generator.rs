//! A thread's own generator: its numbers depend on its seed, not on other threads.

use std::sync::{Barrier, Mutex, MutexGuard};
use std::thread;

use brimful_torch::meta;
use brimful_torch::random::OwnGenerator;
use tch::nn::RNN;
use tch::{Device, Kind, Tensor, manual_seed, nn};

const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);
const LONG: (Kind, Device) = (Kind::Int64, Device::Cpu);
/// Large enough that equal draws are no accident, and odd for the vectorised kernels.
const SIZE: [i64; 2] = [17, 33];

type Draw = fn() -> Tensor;

/// Operations that draw: with a generator argument, or through such an operation.
const DRAWS: [(&str, Draw); 28] = [
    ("rand", || Tensor::rand(SIZE, CPU)),
    ("rand_like", || ones().rand_like()),
    ("randn", || Tensor::randn(SIZE, CPU)),
    ("randn_like", || ones().randn_like()),
    ("randint", || Tensor::randint(1 << 30, SIZE, LONG)),
    ("randint_low", || Tensor::randint_low(-1000, 1 << 30, SIZE, LONG)),
    ("randint_like", || ones().randint_like(1 << 20)),
    ("randperm", || Tensor::randperm(100, LONG)),
    ("bernoulli", || (ones() * 0.5).bernoulli()),
    ("bernoulli_p", || ones().bernoulli_p(0.5)),
    ("bernoulli_", || ones().bernoulli_(&(ones() * 0.5))),
    ("normal_", || ones().normal_(0.0, 1.0)),
    ("normal_functional", || ones().normal_functional(0.0, 1.0)),
    ("uniform_", || ones().uniform_(0.0, 1.0)),
    ("random_", || ones().random_()),
    ("exponential_", || ones().exponential_(1.0)),
    ("geometric_", || ones().geometric_(0.01)),
    ("log_normal_", || ones().log_normal_(0.0, 1.0)),
    ("cauchy_", || ones().cauchy_(0.0, 1.0)),
    ("poisson", || (ones() * 100.0).poisson()),
    ("binomial", || Tensor::binomial(&(ones() * 100.0), &(ones() * 0.5))),
    ("multinomial", || ones().multinomial(8, false)),
    ("dropout", || ones().dropout(0.5, true)),
    ("native_dropout", || ones().native_dropout(0.5, true).0),
    ("alpha_dropout", || ones().alpha_dropout(0.5, true)),
    ("feature_dropout", || Tensor::ones([8, 64, 3], CPU).feature_dropout(0.5, true)),
    ("attention", attention_with_dropout),
    ("lstm", lstm_with_dropout),
];

fn ones() -> Tensor {
    Tensor::ones(SIZE, CPU)
}

fn attention_with_dropout() -> Tensor {
    let [q, k, v] = [(); 3].map(|()| Tensor::ones([2, 2, 16, 8], CPU).set_requires_grad(true));
    let mask = None::<Tensor>;
    Tensor::scaled_dot_product_attention(&q, &k, &v, mask, 0.5, false, None, false)
}

fn lstm_with_dropout() -> Tensor {
    let store = nn::VarStore::new(Device::Cpu);
    let config = nn::RNNConfig { num_layers: 2, dropout: 0.5, train: true, ..Default::default() };
    nn::lstm(store.root(), 4, 16, config).seq(&Tensor::ones([2, 8, 4], CPU)).0
}

/// Draws from all operations in turn, from one seed.
fn draw_all(seed: u64) -> Vec<Tensor> {
    let own = OwnGenerator::enter();
    own.seed(seed);
    DRAWS.iter().map(|(_, draw)| draw()).collect()
}

/// Serialises the tests that use the common generator.
fn common_generator() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[test]
fn four_threads_at_once_draw_what_each_draws_alone() {
    let alone: Vec<_> = (0..4).map(draw_all).collect();
    let start = Barrier::new(4);
    let together = thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|seed| {
                let start = &start;
                scope.spawn(move || {
                    start.wait();
                    draw_all(seed)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("it draws")).collect::<Vec<_>>()
    });
    assert_eq!(together, alone);
}

#[test]
fn each_operation_draws_what_a_manual_seed_gives_it() {
    let _common = common_generator();
    for (name, draw) in DRAWS {
        manual_seed(7);
        let expected = draw();
        let own = OwnGenerator::enter();
        own.seed(7);
        let first = draw();
        assert_ne!(draw(), first, "{name} draws the same twice");
        own.seed(7);
        assert_eq!((draw(), &first), (expected, &first), "{name}");
    }
}

#[test]
fn the_common_generator_does_not_notice() {
    let _common = common_generator();
    manual_seed(1);
    let expected = (Tensor::rand(SIZE, CPU), Tensor::rand(SIZE, CPU));
    manual_seed(1);
    let first = Tensor::rand(SIZE, CPU);
    draw_all(1);
    assert_eq!((first, Tensor::rand(SIZE, CPU)), expected);
}

#[test]
fn guards_nest_and_may_be_dropped_in_any_order() {
    let draw = || Tensor::rand([4], CPU);
    let outer = OwnGenerator::enter();
    let expected = [draw(), draw(), draw()];
    outer.seed(0);
    assert_eq!(draw(), expected[0]);
    let inner = OwnGenerator::enter();
    inner.seed(5);
    assert_ne!(draw(), expected[1]);
    drop(inner);
    assert_eq!(draw(), expected[1]);

    let inner = OwnGenerator::enter();
    drop(outer);
    assert_eq!(draw(), expected[0], "the inner one, of seed 0, goes on");
    drop(inner);
}

#[test]
fn a_seed_starts_again_also_in_the_middle_of_a_pair() {
    // libtorch draws normal numbers in pairs and keeps the second one.
    let own = OwnGenerator::enter();
    let draw = || Tensor::randn([3], CPU);
    let first = draw();
    own.seed(0);
    assert_eq!(draw(), first);
}

#[test]
fn gradients_flow_through_what_was_drawn() {
    let own = OwnGenerator::enter();
    let x = ones().set_requires_grad(true);
    x.dropout(0.5, true).sum(Kind::Float).backward();
    own.seed(0);
    assert_eq!(x.grad(), ones().dropout(0.5, true));
}

#[test]
fn shapes_without_memory_draw_nothing() {
    let own = OwnGenerator::enter();
    let expected = Tensor::rand(SIZE, CPU);
    own.seed(0);
    let shapeless = meta::enter();
    for draw in
        [|| Tensor::rand(SIZE, CPU), || Tensor::randn(SIZE, CPU), || ones().dropout(0.5, true)]
    {
        assert!(draw().f_double_value(&[0, 0]).is_err(), "it has values");
    }
    drop(shapeless);
    assert_eq!(Tensor::rand(SIZE, CPU), expected);
}
