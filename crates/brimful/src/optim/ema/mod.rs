//! Exponential moving averages of a model's weights, which often evaluate better than the last weights.
//!
//! ```
//! use brimful::optim::{Ema, Optimizer, Sgd};
//! use tch::{Device, Kind, Tensor, nn, nn::Module};
//!
//! let store = nn::VarStore::new(Device::Cpu);
//! let model = nn::linear(store.root(), 4, 2, Default::default());
//! let mut optimizer = Optimizer::new(&store, Sgd::new(0.1))?;
//! let mut ema = Ema::new(&store, 0.999)?.warmup(true);
//!
//! let x = Tensor::ones([8, 4], (Kind::Float, Device::Cpu));
//! model.forward(&x).square().mean(Kind::Float).backward();
//! optimizer.step()?;
//! ema.update()?;
//!
//! ema.swap_in()?; // evaluate with the averages,
//! ema.swap_out()?; // and train on with the model's own weights
//! # Ok::<(), brimful::Error>(())
//! ```

mod saved;
mod update;

use brimful_torch::arena::ArenaGuard;
use brimful_torch::foreach;
use brimful_torch::optim::fits;
use tch::{Tensor, nn};

use super::check_named;
use super::number_options::within;
use crate::Result;
use crate::memory::Arena;
use crate::ranks::summed_in;

/// Exponential moving averages of a model's variables: *average ← decay · average + (1 − decay) · weight*.
///
/// The average of an f16 or bf16 weight is in f32. A variable without a gradient, such as the running
/// statistics of norms or a frozen parameter, is not averaged but copied. The averages are allocated in the
/// memory that the caller has entered.
#[derive(Debug)]
pub struct Ema {
    averages: Vec<Average>,
    decay: f64,
    warmup: bool,
    /// Number of updates of the averages.
    updates: u64,
    /// The model's own weights while the averages are swapped in, in the order of the averages.
    own: Option<Vec<Tensor>>,
}

/// Variable and its average.
#[derive(Debug)]
struct Average {
    name: String,
    variable: Tensor,
    value: Tensor,
    /// The host's arena, if the variable is offloaded.
    offload: Option<Arena>,
}

impl Ema {
    /// Begins averages of the store's variables at their present values. Variables that are created later
    /// are not included.
    ///
    /// # Errors
    /// When the decay is not in 0..1, or memory runs out.
    pub fn new(store: &nn::VarStore, decay: f64) -> Result<Self> {
        Self::for_named(store.variables().into_iter().collect(), decay)
    }

    /// Begins averages of these variables.
    ///
    /// # Errors
    /// When two have the same name, the decay is not in 0..1, or memory runs out.
    pub fn for_named(named: Vec<(String, Tensor)>, decay: f64) -> Result<Self> {
        Self::with_offload(named, decay, |_| None)
    }

    /// Begins averages of these variables, each charged to the arena that `offload` returns for its name.
    pub(crate) fn with_offload(
        mut named: Vec<(String, Tensor)>,
        decay: f64,
        offload: impl Fn(&str) -> Option<Arena>,
    ) -> Result<Self> {
        check_decay(decay)?;
        check_named(&named)?;
        named.sort_by(|(a, _), (b, _)| a.cmp(b));
        let average = |(name, variable): (String, Tensor)| {
            let offload = offload(&name);
            Average::of(name, variable, offload)
        };
        let averages = tch::no_grad(|| named.into_iter().map(average).collect::<Result<_>>())?;
        Ok(Self { averages, decay, warmup: false, updates: 0, own: None })
    }

    /// Sets whether to begin with a smaller decay, so that the first weights are soon forgotten: the decay of
    /// update *t*, counted from 0, is at most *(1 + t) / (10 + t)*.
    #[must_use]
    pub fn warmup(self, warmup: bool) -> Self {
        Self { warmup, ..self }
    }

    pub(crate) fn set_warmup(&mut self, warmup: bool) {
        self.warmup = warmup;
    }

    /// Returns the number of updates of the averages.
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// Returns the averages with the names of their variables, sorted by name.
    pub fn averages(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.averages.iter().map(|average| (average.name.as_str(), &average.value))
    }

    /// Swaps the averages into the model. Keeps the model's own weights until [`Ema::swap_out`]; until then
    /// there is no update. Does nothing if the averages are swapped in already.
    ///
    /// # Errors
    /// When memory runs out; the model is unchanged then.
    pub fn swap_in(&mut self) -> Result<()> {
        if self.own.is_some() {
            return Ok(());
        }
        let _no_grad = tch::no_grad_guard();
        let variables = weights(&self.averages)?;
        let own = variables.iter().zip(&self.averages).map(|(variable, average)| {
            let _charged = average.enter_host_arena();
            Ok(variable.f_empty_like()?)
        });
        let own = own.collect::<Result<Vec<Tensor>>>()?;
        foreach::copy(&own, &variables)?;
        self.own = Some(own);
        Ok(foreach::copy(&variables, &values(&self.averages))?)
    }

    /// Restores the model's own weights, to the last bit. Does nothing if they are in place.
    ///
    /// # Errors
    /// When libtorch refuses.
    pub fn swap_out(&mut self) -> Result<()> {
        let Some(own) = &self.own else { return Ok(()) };
        let _no_grad = tch::no_grad_guard();
        foreach::copy(&weights(&self.averages)?, own)?;
        self.own = None;
        Ok(())
    }
}

impl Average {
    fn of(name: String, variable: Tensor, offload: Option<Arena>) -> Result<Self> {
        let _charged = offload.as_ref().map(Arena::enter);
        let kind = summed_in(variable.kind());
        // A copy in any case, with the same strides.
        let value = variable.f_detach()?.f_to_dtype(kind, false, true)?;
        Ok(Self { name, variable, value, offload })
    }

    /// Charges allocations to the host's arena while the guard lives, if the average is offloaded.
    fn enter_host_arena(&self) -> Option<ArenaGuard> {
        self.offload.as_ref().map(Arena::enter)
    }

    /// Returns whether the variable is averaged, not copied.
    fn is_averaged(&self) -> bool {
        self.variable.requires_grad()
    }

    /// Returns whether the average and its variable have the same dtype, device and strides.
    fn is_alike(&self) -> bool {
        fits(&self.value, &self.variable) && self.value.kind() == self.variable.kind()
    }
}

fn values<'a>(averages: impl IntoIterator<Item = &'a Average>) -> Vec<Tensor> {
    averages.into_iter().map(|average| average.value.shallow_clone()).collect()
}

/// Returns the variables as detached tensors, which may be written.
fn weights<'a>(averages: impl IntoIterator<Item = &'a Average>) -> Result<Vec<Tensor>> {
    averages.into_iter().map(|average| Ok(average.variable.f_detach()?)).collect()
}

fn check_decay(decay: f64) -> Result<()> {
    within("decay", decay, (0.0..1.0).contains(&decay), "give a number of at least 0 and below 1")
}
