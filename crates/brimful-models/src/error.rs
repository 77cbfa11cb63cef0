//! Shapes that no model has.

use thiserror::Error;

/// Why a model of this shape cannot be described.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ShapeError {
    /// A U-Net's cell has a way in and a way out.
    #[error("a U-Net's cell of {blocks} blocks cannot change its width twice: give it 2 or more")]
    UNetBlocks {
        /// How many it was to have.
        blocks: usize,
    },
    /// A U-Net ends at half of its channels.
    #[error("a U-Net ends at half of its channels, of which there are {channels}: give it 2, 4, …")]
    UNetChannels {
        /// How many it was to have.
        channels: i64,
    },
    /// An AmoebaNet's normal cells stand in three groups.
    #[error("{cells} normal cells cannot be three equal groups: give an AmoebaNet 3, 6, 9, …")]
    AmoebaNetCells {
        /// How many it was to have.
        cells: usize,
    },
    /// An AmoebaNet's filters are cut twice: for its stem, and in its first cell.
    #[error("{filters} filters cannot be cut into eight parts: give an AmoebaNet 8, 16, 24, …")]
    AmoebaNetFilters {
        /// How many it was to have.
        filters: i64,
    },
}
