//! TensorBoard's file format: records with checksums. Each record is an `Event` as a protocol buffer; this module
//! writes only the fields that scalars need.

/// Version string in the first event of every file.
const FILE_VERSION: &str = "brain.Event:2";
/// Bytes before a record's data: the data's length in 8 bytes, and the length's checksum in 4. The data's checksum
/// comes after the data.
const HEAD_BYTES: usize = 12;
const CHECKSUM_BYTES: usize = 4;

/// Wire types of the fields written here.
const VARINT: u8 = 0;
const EIGHT_BYTES: u8 = 1;
const LENGTH_DELIMITED: u8 = 2;
const FOUR_BYTES: u8 = 5;

/// Returns the first record of a file.
pub(super) fn first_record(wall_time: f64) -> Vec<u8> {
    let time = field(1, EIGHT_BYTES, &wall_time.to_le_bytes());
    record(&[time, text(3, FILE_VERSION.as_bytes())].concat())
}

/// Returns the record of a step's scalars, by tag.
pub(super) fn scalars(wall_time: f64, step: usize, values: &[(&str, f64)]) -> Vec<u8> {
    let scalar = |(tag, value): &(&str, f64)| {
        let value = field(2, FOUR_BYTES, &(*value as f32).to_le_bytes());
        text(1, &[text(1, tag.as_bytes()), value].concat())
    };
    let summary: Vec<u8> = values.iter().flat_map(scalar).collect();
    let time = field(1, EIGHT_BYTES, &wall_time.to_le_bytes());
    let step = field(2, VARINT, &varint(step as u64));
    record(&[time, step, text(5, &summary)].concat())
}

/// Splits a file into records, up to the first broken record.
pub(super) fn records(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        let (one, after) = split_record(rest)?;
        rest = after;
        Some(one)
    })
}

/// Returns the step of a record that this module wrote, or 0 if the record has no step.
pub(super) fn step_of(record: &[u8]) -> usize {
    let event = &record[HEAD_BYTES..record.len() - CHECKSUM_BYTES];
    // The time comes first: one byte for the field, and eight for its value.
    match event.get(9..) {
        Some([name, rest @ ..]) if *name == name_of(2, VARINT) => read_varint(rest),
        _ => 0,
    }
}

/// Returns whether a record has a scalar with this tag.
pub(super) fn has(record: &[u8], tag: &str) -> bool {
    record.windows(tag.len()).any(|window| window == tag.as_bytes())
}

/// Frames data with its length and checksums.
fn record(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    [&length[..], &checksum(&length), data, &checksum(data)].concat()
}

/// Splits off the first record. Returns none if the record is truncated or a checksum is wrong.
fn split_record(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = bytes.split_first_chunk::<8>()?;
    let (stored, _) = rest.split_first_chunk::<CHECKSUM_BYTES>()?;
    let data = usize::try_from(u64::from_le_bytes(*length)).ok()?;
    let whole = data.checked_add(HEAD_BYTES + CHECKSUM_BYTES)?;
    let (record, after) = bytes.split_at_checked(whole)?;
    let (data, last) = record[HEAD_BYTES..].split_last_chunk::<CHECKSUM_BYTES>()?;
    (checksum(length) == *stored && checksum(data) == *last).then_some((record, after))
}

/// Returns a CRC-32C as the format masks it, by a rotation and an offset. Without the mask, the checksum of data
/// that contains checksums would be weak.
fn checksum(bytes: &[u8]) -> [u8; CHECKSUM_BYTES] {
    let masked = crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xA282_EAD8);
    masked.to_le_bytes()
}

/// Returns the byte that a field begins with: its number and its wire type.
fn name_of(field: u8, kind: u8) -> u8 {
    field << 3 | kind
}

fn field(number: u8, kind: u8, value: &[u8]) -> Vec<u8> {
    [&[name_of(number, kind)], value].concat()
}

/// Writes a string, or a nested message.
fn text(number: u8, text: &[u8]) -> Vec<u8> {
    field(number, LENGTH_DELIMITED, &[&varint(text.len() as u64), text].concat())
}

/// Writes seven bits per byte, lowest first; all bytes but the last have the eighth bit set.
fn varint(mut number: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
    bytes
}

fn read_varint(bytes: &[u8]) -> usize {
    let end = bytes.iter().position(|byte| byte & 0x80 == 0).unwrap_or(0);
    bytes[..=end].iter().rev().fold(0, |number, byte| number << 7 | usize::from(byte & 0x7F))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_what_tensorboard_reads() {
        // The layout that TensorBoard's own writer uses: length, checksum, data, checksum.
        let event = [&[0x09][..], &1.5_f64.to_le_bytes(), &[0x1A, 13], b"brain.Event:2"].concat();
        let made = first_record(1.5);
        assert_eq!(made[..8], 24_u64.to_le_bytes());
        assert_eq!(made[12..36], event);
        assert_eq!(made.len(), 40);
        let step = scalars(0.0, 300, &[("a", 1.0)]);
        let expected =
            [&[0x10, 0xAC, 0x02, 0x2A, 10, 0x0A, 8, 0x0A, 1, b'a', 0x15][..], &1_f32.to_le_bytes()];
        assert_eq!(step[21..step.len() - 4], expected.concat());
    }

    #[test]
    fn records_are_read_until_one_is_broken() {
        let [first, second] = [first_record(2.0), scalars(2.0, 77, &[("train/loss", 0.25)])];
        let both = [first.clone(), second.clone()].concat();
        assert_eq!(records(&both).collect::<Vec<_>>(), [&first[..], &second[..]]);
        assert_eq!((step_of(&first), step_of(&second)), (0, 77));
        assert!(has(&second, "train/loss") && !has(&second, "test/loss"));
        assert_eq!(records(&both[..both.len() - 1]).count(), 1);
        let mut wrong = both.clone();
        wrong[first.len() + 20] ^= 1;
        assert_eq!(records(&wrong).count(), 1);
    }

    #[test]
    fn numbers_of_any_length_come_back() {
        for number in [0, 1, 127, 128, 300, 1 << 40] {
            assert_eq!(read_varint(&varint(number)) as u64, number);
        }
    }
}
