//! Memory accounts: bytes in use, peak and limit, for CPU and CUDA alike.
//!
//! An [`Arena`] makes a CPU behave as a device of a given size: past its limit an allocation fails as it
//! does on a full GPU, and always at the same allocation.
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
//! An arena counts the allocations of libtorch's CPU allocator on threads that have entered it. It does not
//! count scratch space that oneDNN and MKL allocate themselves inside an operation, nor buffers of an
//! operation's helper threads.

pub(crate) mod devices;
mod host;

use brimful_torch::arena::{Account, ArenaGuard};
#[doc(inline)]
pub use brimful_torch::host::keep_freed_blocks;
use brimful_torch::memory as torch_memory;
use tch::Device;

pub(crate) use host::host;
pub use host::host_available;

pub use crate::oom::OutOfMemory;

use crate::{Error, Result};
use brimful_plan::bytes::Bytes;

/// CPU memory account with a name and an optional limit. Clones share the account.
#[derive(Debug, Clone)]
pub struct Arena {
    name: String,
    account: Account,
}

impl Arena {
    /// Creates an arena that counts but does not limit.
    pub fn new(name: &str) -> Self {
        Self { name: name.to_owned(), account: Account::new(name) }
    }

    /// Creates an arena in which at most `bytes` can be in use.
    ///
    /// # Errors
    /// When the limit is 0.
    pub fn limited(name: &str, bytes: u64) -> Result<Self> {
        let arena = Self::new(name);
        arena.set_limit(Some(bytes))?;
        Ok(arena)
    }

    /// Changes the limit; `None` removes it.
    ///
    /// # Errors
    /// When the limit is 0, or below the bytes in use: then the old limit stays.
    pub fn set_limit(&self, bytes: Option<u64>) -> Result<()> {
        check_limit(&self.name, bytes, self.current())?;
        self.account.set_limit(bytes);
        Ok(())
    }

    /// Charges this thread's CPU allocations to the arena until the guard is dropped. A block stays charged to the
    /// arena until it is freed, by whatever thread.
    pub fn enter(&self) -> ArenaGuard {
        self.account.enter()
    }

    /// Returns the name, which out-of-memory errors carry.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the limit in bytes, if there is one.
    pub fn limit(&self) -> Option<u64> {
        self.account.limit()
    }

    /// Returns the bytes in use now.
    pub fn current(&self) -> u64 {
        self.account.current()
    }

    /// Returns the peak bytes in use since the arena was created or since the last [`Arena::reset_peak`].
    pub fn peak(&self) -> u64 {
        self.account.peak()
    }

    /// Resets the peak to the bytes in use now.
    pub fn reset_peak(&self) {
        self.account.reset_peak();
    }

    /// Returns the number of requested allocations, including refused ones.
    pub fn allocations(&self) -> u64 {
        self.account.allocations()
    }

    /// Returns the number of refused allocations.
    pub fn refusals(&self) -> u64 {
        self.account.refusals()
    }

    /// Makes the n-th allocation from now fail once, as if memory had run out (1 is the next one, 0 cancels
    /// it). For tests of out-of-memory handling.
    pub fn fail_nth_allocation(&self, n: u64) {
        self.account.fail_allocations(n, u64::from(n > 0));
    }

    /// Makes every allocation fail from the n-th on (1 is the next one), until
    /// [`Arena::fail_nth_allocation`] cancels it. For tests of out-of-memory handling.
    pub fn fail_from_nth_allocation(&self, n: u64) {
        self.account.fail_allocations(n, u64::MAX);
    }
}

/// Memory that a computation runs in: a CPU arena or an accelerator.
#[derive(Debug, Clone)]
pub enum Memory {
    /// CPU arena.
    Arena(Arena),
    /// CUDA device.
    Accelerator(Device),
}

/// Usage of a [`Memory`] at one time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Usage {
    /// Bytes in use by tensors now.
    pub current: Bytes,
    /// Peak bytes in use since the peak was reset.
    pub peak: Bytes,
    /// Bytes that tensors could still take after emptying the cache; `None` without a limit.
    pub available: Option<Bytes>,
    /// Limit; `None` if there is none.
    pub limit: Option<Bytes>,
    /// Number of times the allocator emptied its cache to serve a request. A CPU has no such cache.
    pub allocation_retries: u64,
    /// Number of refused requests since the start.
    pub refusals: u64,
}

impl Memory {
    /// Returns the memory of this device: for a CPU, a new arena without a limit.
    ///
    /// # Errors
    /// When there is no such device.
    pub fn of(device: Device) -> Result<Self> {
        match crate::device::find(&crate::device::name(device))? {
            Device::Cpu => Ok(Self::Arena(Arena::new("cpu"))),
            accelerator => Ok(Self::Accelerator(accelerator)),
        }
    }

    /// Returns the device of this memory's tensors.
    pub fn device(&self) -> Device {
        match self {
            Self::Arena(_) => Device::Cpu,
            Self::Accelerator(device) => *device,
        }
    }

    /// Changes the limit; `None` removes it. An accelerator's limit applies to this process and counts libtorch's
    /// cache: so several processes can share a GPU, and a large GPU can stand in for a smaller one.
    ///
    /// # Errors
    /// When the limit is 0, or below the bytes in use: then the old limit stays. When the accelerator does
    /// not respond.
    pub fn set_limit(&self, bytes: Option<u64>) -> Result<()> {
        match self {
            Self::Arena(arena) => arena.set_limit(bytes),
            Self::Accelerator(device) => {
                // Emptied first, because cached memory would count as used.
                self.empty_cache()?;
                let in_use = torch_memory::device_memory(*device)?.reserved;
                check_limit(&crate::device::name(*device), bytes, in_use)?;
                Ok(torch_memory::set_limit(*device, bytes)?)
            }
        }
    }

    /// Charges this thread's CPU allocations to the arena until the guard is dropped. Returns `None` for an
    /// accelerator, whose allocator counts by itself.
    #[must_use = "an arena is left when the guard is dropped"]
    pub fn enter(&self) -> Option<ArenaGuard> {
        match self {
            Self::Arena(arena) => Some(arena.enter()),
            Self::Accelerator(_) => None,
        }
    }

    /// Reads the current usage.
    ///
    /// # Errors
    /// When the accelerator does not respond.
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

    /// Resets the peak to the bytes in use now.
    ///
    /// # Errors
    /// When the accelerator does not respond.
    pub fn reset_peak(&self) -> Result<()> {
        match self {
            Self::Arena(arena) => arena.reset_peak(),
            Self::Accelerator(device) => torch_memory::reset_peak(*device)?,
        }
        Ok(())
    }

    /// Returns cached memory that no tensor uses to the device. A CPU has no cache.
    ///
    /// # Errors
    /// When the accelerator does not respond.
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
        Some(0) => Err(Error::LimitOfZero { memory }),
        Some(limit) if limit < in_use => {
            Err(Error::LimitBelowUse { memory, limit: Bytes(limit), in_use: Bytes(in_use) })
        }
        _ => Ok(()),
    }
}

/// Returns the limit of a memory; the machine's total memory if there is no account or no limit.
pub(crate) fn end_of(memory: Option<&Memory>) -> Result<Bytes> {
    let usage = memory.map(Memory::usage).transpose()?;
    usage.and_then(|usage| usage.limit).map_or_else(|| Ok(host()?.total), Ok)
}
