//! Crop of an image: a square, mirrored or not.

use super::super::number_stream::NumberStream;

/// Share of the shorter side that the crop shows, as in 224 of 256 pixels.
const SHOWN: (i64, i64) = (7, 8);

/// A square of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ImageView {
    pub(super) top: i64,
    pub(super) left: i64,
    pub(super) side: i64,
    pub(super) mirrored: bool,
}

impl ImageView {
    /// Returns the centre of the image, not mirrored.
    pub(super) fn central(height: i64, width: i64) -> Self {
        let side = shown(height, width);
        Self { top: (height - side) / 2, left: (width - side) / 2, side, mirrored: false }
    }

    /// Returns a square at a random place, mirrored half the time.
    pub(super) fn random(height: i64, width: i64, numbers: &mut NumberStream) -> Self {
        let side = shown(height, width);
        let mut place = |room: i64| numbers.below(room.unsigned_abs() + 1) as i64;
        let (top, left) = (place(height - side), place(width - side));
        Self { top, left, side, mirrored: numbers.below(2) == 1 }
    }
}

fn shown(height: i64, width: i64) -> i64 {
    (height.min(width) * SHOWN.0 / SHOWN.1).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_is_seven_eighths_of_the_shorter_side() {
        let view = ImageView::central(256, 320);
        assert_eq!(view, ImageView { top: 16, left: 48, side: 224, mirrored: false });
        assert_eq!(ImageView::central(1, 5).side, 1);
    }

    #[test]
    fn random_squares_are_everywhere_within_the_image() {
        let mut numbers = NumberStream::new(1);
        let views: Vec<_> = (0..500).map(|_| ImageView::random(16, 32, &mut numbers)).collect();
        let all = |place: fn(&ImageView) -> i64| {
            let mut places: Vec<_> = views.iter().map(place).collect();
            places.sort_unstable();
            places.dedup();
            places
        };
        assert_eq!(all(|view| view.top), [0, 1, 2]);
        assert!(all(|view| view.left).into_iter().eq(0..=18));
        let mirrored = views.iter().filter(|view| view.mirrored).count();
        assert!((200..300).contains(&mirrored), "{mirrored}");
    }
}
