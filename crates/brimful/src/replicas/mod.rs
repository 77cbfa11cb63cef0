//! Data parallelism in one process: replicas of a model on several devices, each with a part of every
//! mini-batch.
//!
//! ```text
//!   mirror   every replica copies the first one's variables
//!   attempt  every replica runs its part of the mini-batch in micro-batches, as `MicroBatcher` does
//!   reduce   the gradients are summed in the replicas' order, each thread a part of the parameters
//!   commit   loss, gradients and statistics are those of the whole mini-batch, on the first replica
//! ```
//!
//! ```
//! use brimful::optim::{Optimizer, Sgd};
//! use brimful::{Loss, Replicas, MicroBatches};
//! use tch::nn::{self, Module};
//! use tch::{Device, Kind, Tensor};
//!
//! let devices = [Device::Cpu, Device::Cpu];
//! let build = |root: &nn::Path| nn::linear(root, 8, 3, Default::default());
//! let mut replicas = Replicas::new(devices, MicroBatches::Samples(16), build)?;
//! let mut optimizer = Optimizer::new(replicas.store(), Sgd::new(0.1))?;
//!
//! let batch = (
//!     Tensor::randn([64, 8], (Kind::Float, Device::Cpu)),
//!     Tensor::randint(3, [64], (Kind::Int64, Device::Cpu)),
//! );
//! let step = replicas.backward(&batch, |model, (x, y)| {
//!     Loss::mean(model.forward(&x).cross_entropy_for_logits(&y))
//! })?; // the gradients of the full batch are in the first replica's store
//! optimizer.step()?;
//! optimizer.zero_grad()?;
//! assert_eq!((step.shares, step.sizes), (vec![32, 32], vec![16, 16, 16, 16]));
//! # Ok::<(), brimful::Error>(())
//! ```
//!
//! *The first replica is the model.* Its [`store`](Replicas::store) has the gradients after a step, and the other
//! replicas copy its variables before they run. So every change of the store reaches them: an optimizer's step,
//! clipping, loading, freezing, another dtype. Any optimizer works, its state exists once, and all replicas have
//! bit-equal parameters. Steps of the optimizer on every replica would not be faster: each would read and write
//! the optimizer's state, which takes more memory traffic than one copy of the parameters.
//!
//! *Parts* are in proportion to the replicas' speeds, measured in real steps; see [`Replicas::set_speeds`].
//! Sums are in the replicas' order, so results depend on timing only through the parts.
//!
//! *Random numbers* belong to a step, a replica and a micro-batch ([`StepReport::seed`](crate::StepReport::seed)).
//!
//! *Running statistics* of deferred BatchNorm layers are those of all samples. Layers that update their statistics
//! at every micro-batch count only the first replica's micro-batches.

mod attempt;
mod calls;
mod engine;
mod error;
mod mirror;
mod reduce;
mod replica;
mod settings;
mod shares;
mod whole;

use std::sync::Arc;

use tch::Device;
use tch::nn::{Path, VarStore};

pub use error::ReplicasError;

use crate::Result;
use crate::random::preserving_generators;
use crate::step::{MicroBatches, Parts, StepState, names};
use crate::workers::{DeviceSpec, Workers, resolved};
use mirror::ModelOutline;
use replica::{Replica, Setting};
use shares::Speeds;

/// Model on several devices. Dropping it waits until its threads have ended.
pub struct Replicas<M> {
    workers: Workers<Replica<M>>,
    devices: Vec<DeviceSpec>,
    store: VarStore,
    speeds: Speeds,
    /// Whether micro-batches run as CUDA graphs.
    cuda_graphs: bool,
    settings: Vec<Setting>,
    state: StepState<Parts>,
}

impl<M> std::fmt::Debug for Replicas<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Replicas").field("devices", &self.devices).finish_non_exhaustive()
    }
}

impl<M: 'static> Replicas<M> {
    /// Builds the model on every device, each on its own thread, where it stays.
    ///
    /// A CPU can be given several times, each time with its own threads and arena ([`DeviceSpec`]); an
    /// accelerator once. The parameters' initial values are those that the plain model would have on the
    /// first device. The size, a number of samples or of micro-batches, applies to each replica's part.
    ///
    /// # Errors
    /// When there is no device, one does not exist or is given twice, the model cannot be built, or `build`
    /// does not build the same model everywhere.
    pub fn new<D: Into<DeviceSpec>>(
        devices: impl IntoIterator<Item = D>,
        size: MicroBatches,
        build: impl Fn(&Path<'_>) -> M + Send + Sync + 'static,
    ) -> Result<Self> {
        let mut devices = resolved(devices.into_iter().map(Into::into).collect())?;
        error::check(&devices)?;
        size.check()?;
        if size.is_automatic() {
            devices = devices.into_iter().map(DeviceSpec::counted).collect();
        }
        let mut stores: Vec<_> = devices.iter().map(|d| VarStore::new(d.device)).collect();
        let build = Arc::new(build);
        let places = devices.iter().zip(&stores).enumerate();
        // Each model is built on the thread that it stays on, because it need not be `Send`: the caller
        // shares only its variables.
        let builders = places.map(|(number, (device, store))| {
            let device = device.clone();
            let store = sharing(store);
            let build = Arc::clone(&build);
            move || Replica::build(number, store, &device, &*build)
        });
        let others = devices[1..].iter().map(|device| device.device).collect();
        // The initial values of the other replicas are replaced, so their draws must not move the generators.
        let workers =
            preserving_generators(others, || Workers::spawn(&devices, builders.collect()))?;
        mirror::check_alike(&stores.iter().map(ModelOutline::of).collect::<Vec<_>>())?;
        let store = stores.swap_remove(0);
        follow_first(&workers, &store)?;
        Ok(Self {
            speeds: Speeds::even(devices.len()),
            workers,
            devices,
            store,
            cuda_graphs: false,
            settings: Vec::new(),
            state: StepState::new(size),
        })
    }

    /// Returns the first replica's variables, which are the model's.
    pub fn store(&self) -> &VarStore {
        &self.store
    }

    /// Returns the first replica's variables, to load, freeze or convert them.
    pub fn store_mut(&mut self) -> &mut VarStore {
        &mut self.store
    }

    /// Returns the device of the first replica, where gradients and outputs are.
    pub fn device(&self) -> Device {
        self.devices[0].device
    }

    /// Returns the number of replicas.
    pub fn len(&self) -> usize {
        self.devices.len()
    }

    /// Returns false: there is at least one replica.
    pub fn is_empty(&self) -> bool {
        self.devices.is_empty()
    }
}

/// Makes all replicas copy the first one's variables, in this store, from now on.
fn follow_first<M: 'static>(workers: &Workers<Replica<M>>, store: &VarStore) -> Result<()> {
    let first = (0..workers.len()).map(|_| names(&store.variables_).into_list()).collect();
    let main_device = store.device();
    let follow = move |replica: &mut Replica<M>, first| {
        replica.follow(main_device, first);
        Ok(())
    };
    workers.each_or_error(first, follow).map(drop)
}

/// Returns a store that shares the variables of this one.
fn sharing(store: &VarStore) -> VarStore {
    let mut other = VarStore::new(store.device());
    other.variables_ = Arc::clone(&store.variables_);
    other
}
