//! Decoding of a file into an image for a network: cropped, resized and normalised.

use std::fs;
use std::io::Cursor;
use std::path::Path;

use anyhow::{Result, ensure};
use image::ImageReader;
use tch::{Kind, Tensor};

use super::samples::ImageView;

/// First bytes of a JPEG.
const JPEG: [u8; 2] = [0xff, 0xd8];
/// Mean and deviation of red, green and blue pixels in ImageNet, from 0 to 255, which torchvision's weights were
/// trained with.
const MEAN: [f32; 3] = [123.675, 116.28, 103.53];
const DEVIATION: [f32; 3] = [58.395, 57.12, 57.375];

/// Checks that a file begins like an image: that its header gives the height and width.
pub(super) fn check(path: &Path) -> Result<()> {
    ImageReader::open(path)?.with_guessed_format()?.into_dimensions()?;
    Ok(())
}

/// Reads a file's pixels as RGB bytes: 1 × 3 × height × width.
pub(super) fn pixels(path: &Path) -> Result<Tensor> {
    let bytes = fs::read(path)?;
    // The decoder fills a missing part with grey, so a truncated file is detected here.
    let is_whole = bytes.strip_prefix(&JPEG).is_none_or(has_end);
    ensure!(is_whole, "it ends before its image does");
    let image = ImageReader::new(Cursor::new(bytes)).with_guessed_format()?.decode()?.into_rgb8();
    let (width, height) = image.dimensions();
    let pixels = Tensor::from_slice(image.as_raw());
    Ok(pixels.view([1, i64::from(height), i64::from(width), 3]).permute([0, 3, 1, 2]))
}

/// Returns whether the rest of a JPEG has its end marker. The end marker of a thumbnail within a segment does not
/// count.
fn has_end(mut rest: &[u8]) -> bool {
    loop {
        // Skips entropy-coded data, in which a marker's first byte is followed by a 0 or by a restart marker.
        let marker = rest.windows(2).position(|two| two[0] == 0xff && !is_within(two[1]));
        let Some((marker, after)) = marker.and_then(|at| rest[at + 1..].split_first()) else {
            return false;
        };
        if *marker == 0xd9 {
            return true;
        }
        let length = after.first_chunk::<2>().map(|length| u16::from_be_bytes(*length).into());
        let Some(next) = length.and_then(|length: usize| after.get(length..)) else {
            return false;
        };
        rest = next;
    }
}

/// Returns whether a marker's second byte occurs within image data, or is padding.
fn is_within(byte: u8) -> bool {
    matches!(byte, 0 | 1 | 0xd0..=0xd7 | 0xff)
}

/// Crops and resizes these pixels to normalised floats, 1 × 3 × side × side.
pub(super) fn shown(pixels: &Tensor, view: ImageView, side: i64) -> Result<Tensor> {
    let square = pixels.f_narrow(2, view.top, view.side)?.f_narrow(3, view.left, view.side)?;
    let resized = square.f_internal_upsample_bilinear2d_aa([side, side], false, None, None)?;
    let resized = if view.mirrored { resized.f_flip([3])? } else { resized };
    let [mean, deviation] =
        [MEAN, DEVIATION].map(|colours| Tensor::from_slice(&colours).view([1, 3, 1, 1]));
    Ok(resized.f_to_kind(Kind::Float)?.f_sub(&mean)?.f_div(&deviation)?)
}

#[cfg(test)]
mod tests {
    use image::{Rgb, RgbImage};

    use super::*;

    /// Makes an image that is red on the left and blue on the right.
    fn picture() -> RgbImage {
        RgbImage::from_fn(16, 8, |x, _| if x < 8 { Rgb([255, 0, 0]) } else { Rgb([0, 0, 255]) })
    }

    fn colours(image: &Tensor, column: i64) -> [f64; 3] {
        [0, 1, 2].map(|colour| image.double_value(&[0, colour, 0, column]))
    }

    #[test]
    fn pixels_keep_their_place_and_their_colour() {
        let folder = tempfile::tempdir().expect("a folder");
        for name in ["a.png", "a.jpg"] {
            let path = folder.path().join(name);
            picture().save(&path).expect("written");
            let image = pixels(&path).expect("an image");
            assert_eq!(image.size(), [1, 3, 8, 16]);
            let [red, green, blue] = colours(&image, 1);
            assert!(red > 250.0 && green < 5.0 && blue < 5.0, "{name}: {red} {green} {blue}");
        }
    }

    #[test]
    fn a_view_is_resized_mirrored_and_normalised() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a.png");
        picture().save(&path).expect("written");
        let pixels = pixels(&path).expect("an image");
        let view = ImageView { top: 1, left: 5, side: 6, mirrored: false };
        let image = shown(&pixels, view, 12).expect("a view");
        assert_eq!(image.size(), [1, 3, 12, 12]);
        let red = (255.0 - 123.675) / 58.395;
        assert!((colours(&image, 0)[0] - red).abs() < 1e-4, "{:?}", colours(&image, 0));
        let mirrored = shown(&pixels, ImageView { mirrored: true, ..view }, 12).expect("a view");
        assert_eq!(mirrored.flip([3]), image);
    }

    #[test]
    fn what_is_no_image_or_half_of_one_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a.jpg");
        let noise = RgbImage::from_fn(64, 64, |x, y| Rgb([(x * y % 251) as u8, x as u8, y as u8]));
        noise.save(&path).expect("written");
        let whole = fs::read(&path).expect("a file");
        fs::write(&path, &whole[..whole.len() / 2]).expect("written");
        check(&path).expect("it begins as one");
        assert!(pixels(&path).is_err());
        fs::write(&path, b"GIF89a").expect("written");
        assert!(check(&path).is_err() && pixels(&path).is_err());
        fs::write(&path, b"").expect("written");
        assert!(check(&path).is_err());
    }

    #[test]
    fn half_of_an_image_with_a_whole_one_in_it_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a.jpg");
        picture().save(&path).expect("written");
        let small = fs::read(&path).expect("a file");
        let noise = RgbImage::from_fn(64, 64, |x, y| Rgb([(x * y % 251) as u8, x as u8, y as u8]));
        noise.save(&path).expect("written");
        let large = fs::read(&path).expect("a file");
        // A file as cameras write it: before the image, a separate segment holds a thumbnail.
        let length = (small.len() as u16 + 2).to_be_bytes();
        let whole = [&large[..2], &[0xff, 0xe1], &length, &small, &large[2..]].concat();
        fs::write(&path, &whole).expect("written");
        assert_eq!(pixels(&path).expect("an image").size(), [1, 3, 64, 64]);
        for left in [whole.len() - 2, whole.len() - large.len() / 2, small.len() + 6] {
            fs::write(&path, &whole[..left]).expect("written");
            assert!(pixels(&path).is_err(), "{left}");
        }
    }
}
