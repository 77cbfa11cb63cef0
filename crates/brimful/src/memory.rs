//! Memory accounts: how much is in use, the most there was, and where it ends; CPU and CUDA alike.
//!
//! An [`Arena`] makes a CPU behave as a device of a given size: past its limit an allocation fails
//! as it does on a full GPU, at the same place every time.
//!
//! ```
//! use brimful::memory::Arena;
//! use tch::{Device, Kind, Tensor};
//!
//! let arena = Arena::limited("small", 1 << 20)?;
//! let _inside = arena.enter();
//! let kept = Tensor::zeros([1000], (Kind::Float, Device::Cpu));
//! assert_eq!(arena.current(), 4000);
//! assert!(Tensor::f_zeros([1 << 20], (Kind::Float, Device::Cpu)).is_err());
//! assert_eq!(arena.current(), 4000);
//! # drop(kept);
//! # Ok::<(), brimful::Error>(())
//! ```
//!
//! An arena counts what libtorch's CPU allocator serves on the threads that have entered it. The
//! scratch space that oneDNN and MKL take for themselves inside an operation is not in it, nor are
//! buffers that an operation's helper threads allocate.

mod devices;
mod error;
mod host;

use brimful_torch::arena::{Account, ArenaGuard};
#[doc(inline)]
pub use brimful_torch::host::keep_freed_blocks;
use brimful_torch::memory as torch_memory;
use tch::Device;

pub use devices::{DeviceInfo, devices};
pub use error::MemoryError;
pub use host::{HostMemory, host};

use crate::Result;
use crate::bytes::Bytes;

/// A CPU memory account with a name and, if wanted, a limit. Clones share it.
#[derive(Debug, Clone)]
pub struct Arena {
    name: String,
    account: Account,
}

impl Arena {
    /// An arena that counts but does not limit.
    pub fn new(name: &str) -> Self {
        Self { name: name.to_owned(), account: Account::new(name) }
    }

    /// An arena in which at most `bytes` can be in use.
    ///
    /// # Errors
    /// When the limit is 0.
    pub fn limited(name: &str, bytes: u64) -> Result<Self> {
        let arena = Self::new(name);
        arena.set_limit(Some(bytes))?;
        Ok(arena)
    }

    /// Changes the limit; `None` lifts it.
    ///
    /// # Errors
    /// When the limit is 0, or below what is in use: then the old one stays.
    pub fn set_limit(&self, bytes: Option<u64>) -> Result<()> {
        check_limit(&self.name, bytes, self.current())?;
        self.account.set_limit(bytes);
        Ok(())
    }

    /// Charges this thread's CPU allocations to the arena until the guard is dropped. Blocks stay
    /// charged to it until they are freed, on whatever thread.
    pub fn enter(&self) -> ArenaGuard {
        self.account.enter()
    }

    /// The name that out-of-memory errors carry.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The limit in bytes, if there is one.
    pub fn limit(&self) -> Option<u64> {
        self.account.limit()
    }

    /// Bytes in use now.
    pub fn current(&self) -> u64 {
        self.account.current()
    }

    /// The most bytes in use since the start or the last [`Arena::reset_peak`].
    pub fn peak(&self) -> u64 {
        self.account.peak()
    }

    /// Lets the peak start again from what is in use now.
    pub fn reset_peak(&self) {
        self.account.reset_peak();
    }

    /// How many allocations were asked for, refused ones included.
    pub fn allocations(&self) -> u64 {
        self.account.allocations()
    }

    /// How many allocations were refused.
    pub fn refusals(&self) -> u64 {
        self.account.refusals()
    }

    /// Makes the n-th allocation from now fail once, as if memory had run out (1 is the next one,
    /// 0 calls it off). For tests of what a program does then.
    pub fn fail_nth_allocation(&self, n: u64) {
        self.account.fail_allocations(n, u64::from(n > 0));
    }

    /// Makes every allocation fail from the n-th on (1 is the next one), until
    /// [`Arena::fail_nth_allocation`] calls it off. For tests of what a program does then.
    pub fn fail_from_nth_allocation(&self, n: u64) {
        self.account.fail_allocations(n, u64::MAX);
    }
}

/// The memory that a computation runs in: a CPU arena or an accelerator.
#[derive(Debug, Clone)]
pub enum Memory {
    /// A CPU arena.
    Arena(Arena),
    /// A CUDA device.
    Accelerator(Device),
}

/// What a [`Memory`] holds at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Usage {
    /// In use by tensors now.
    pub current: Bytes,
    /// The most in use since the peak was reset.
    pub peak: Bytes,
    /// What tensors could still take, were the cache empty; `None` where nothing limits it.
    pub available: Option<Bytes>,
    /// Where it ends; `None` where nothing limits it.
    pub limit: Option<Bytes>,
    /// How often the allocator had to empty its cache to serve a request. A CPU has no such cache.
    pub allocation_retries: u64,
    /// How many requests were refused since the start.
    pub refusals: u64,
}

impl Memory {
    /// The accelerator of this name; for a CPU, a new arena without a limit.
    ///
    /// # Errors
    /// When there is no such device.
    pub fn of(device: Device) -> Result<Self> {
        match crate::device::find(&crate::device::name(device))? {
            Device::Cpu => Ok(Self::Arena(Arena::new("cpu"))),
            accelerator => Ok(Self::Accelerator(accelerator)),
        }
    }

    /// The device that tensors of this memory are on.
    pub fn device(&self) -> Device {
        match self {
            Self::Arena(_) => Device::Cpu,
            Self::Accelerator(device) => *device,
        }
    }

    /// Changes the limit; `None` lifts it. An accelerator's is for what this process takes of it, and
    /// counts what libtorch has cached: so a card can be shared, or seem as small as another.
    ///
    /// # Errors
    /// When the limit is 0, or below what is in use: then the old one stays. When the accelerator
    /// does not answer.
    pub fn set_limit(&self, bytes: Option<u64>) -> Result<()> {
        match self {
            Self::Arena(arena) => arena.set_limit(bytes),
            Self::Accelerator(device) => {
                // What is cached would count as used.
                self.empty_cache()?;
                let in_use = torch_memory::device_memory(*device)?.reserved;
                check_limit(&crate::device::name(*device), bytes, in_use)?;
                Ok(torch_memory::set_limit(*device, bytes)?)
            }
        }
    }

    /// Charges this thread's CPU allocations to the arena, if it is one. An accelerator needs no
    /// such thing: its tensors are told from others by their device.
    #[must_use = "an arena is left when the guard is dropped"]
    pub fn enter(&self) -> Option<ArenaGuard> {
        match self {
            Self::Arena(arena) => Some(arena.enter()),
            Self::Accelerator(_) => None,
        }
    }

    /// Reads the figures.
    ///
    /// # Errors
    /// When the accelerator does not answer.
    pub fn usage(&self) -> Result<Usage> {
        Ok(match self {
            Self::Arena(arena) => {
                let (current, limit) = (arena.current(), arena.limit());
                Usage {
                    current: Bytes(current),
                    peak: Bytes(arena.peak()),
                    available: limit.map(|limit| Bytes(limit.saturating_sub(current))),
                    limit: limit.map(Bytes),
                    allocation_retries: 0,
                    refusals: arena.refusals(),
                }
            }
            Self::Accelerator(device) => {
                let figures = torch_memory::device_memory(*device)?;
                let cached = figures.reserved.saturating_sub(figures.current);
                Usage {
                    current: Bytes(figures.current),
                    peak: Bytes(figures.peak),
                    available: Some(Bytes(figures.free + cached)),
                    limit: Some(Bytes(figures.limit)),
                    allocation_retries: figures.allocation_retries,
                    refusals: figures.refusals,
                }
            }
        })
    }

    /// Lets the peak start again from what is in use now.
    ///
    /// # Errors
    /// When the accelerator does not answer.
    pub fn reset_peak(&self) -> Result<()> {
        match self {
            Self::Arena(arena) => arena.reset_peak(),
            Self::Accelerator(device) => torch_memory::reset_peak(*device)?,
        }
        Ok(())
    }

    /// Gives cached memory that no tensor uses back to the device. A CPU caches nothing.
    ///
    /// # Errors
    /// When the accelerator does not answer.
    pub fn empty_cache(&self) -> Result<()> {
        match self {
            Self::Arena(_) => Ok(()),
            Self::Accelerator(device) => Ok(torch_memory::empty_cache(*device)?),
        }
    }
}

fn check_limit(memory: &str, bytes: Option<u64>, in_use: u64) -> Result<()> {
    let memory = memory.to_owned();
    match bytes {
        Some(0) => Err(MemoryError::LimitOfZero { memory }.into()),
        Some(limit) if limit < in_use => {
            Err(MemoryError::LimitBelowUse { memory, limit: Bytes(limit), in_use: Bytes(in_use) }
                .into())
        }
        _ => Ok(()),
    }
}

/// Where a memory ends: one that is not counted, or not limited, where the machine's does.
pub(crate) fn end_of(memory: Option<&Memory>) -> Result<Bytes> {
    let usage = memory.map(Memory::usage).transpose()?;
    usage.and_then(|usage| usage.limit).map_or_else(|| Ok(host()?.total), Ok)
}
