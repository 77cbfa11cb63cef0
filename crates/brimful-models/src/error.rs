//! Errors for shapes that a model cannot have.

use thiserror::Error;

/// Reason why a model cannot have this shape.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ShapeError {
    /// A U-Net's cell needs two blocks: one for its input and one for its output width.
    #[error("a U-Net's cell of {blocks} blocks cannot change its width twice: give it 2 or more")]
    UNetBlocks {
        /// Number of blocks requested.
        blocks: usize,
    },
    /// A U-Net ends at half of its channels.
    #[error(
        "a U-Net ends at half of its channels, but {channels} cannot be halved: give an even number"
    )]
    UNetChannels {
        /// Number of channels requested.
        channels: i64,
    },
    /// An AmoebaNet's normal cells form three equal groups.
    #[error("{cells} normal cells cannot be three equal groups: give an AmoebaNet 3, 6, 9, …")]
    AmoebaNetCells {
        /// Number of cells requested.
        cells: usize,
    },
    /// An AmoebaNet's filters are divided twice: for its stem, and in its first cell.
    #[error("{filters} filters cannot be cut into eight parts: give an AmoebaNet 8, 16, 24, …")]
    AmoebaNetFilters {
        /// Number of filters requested.
        filters: i64,
    },
}
