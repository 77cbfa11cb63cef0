//! Current date and time in UTC.

use std::time::{SystemTime, UNIX_EPOCH};

const SECONDS_OF_A_DAY: u64 = 86_400;

/// Returns the current time as `2031-02-28 17:05 UTC`.
pub(crate) fn now() -> String {
    // A clock that shows a time before 1970 is wrong anyway; its time counts as 1970.
    written(SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()))
}

/// Formats a time, given in seconds since the beginning of 1970.
fn written(seconds: u64) -> String {
    let (mut days, time) = (seconds / SECONDS_OF_A_DAY, seconds % SECONDS_OF_A_DAY);
    let mut month = 0;
    while days >= days_of_month(month) {
        days -= days_of_month(month);
        month += 1;
    }
    let (year, month) = (1970 + month / 12, month % 12 + 1);
    let (hour, minute) = (time / 3600, time / 60 % 60);
    format!("{year}-{month:02}-{:02} {hour:02}:{minute:02} UTC", days + 1)
}

/// Returns the number of days in a month, counted from January 1970.
fn days_of_month(month: usize) -> u64 {
    let year = 1970 + month / 12;
    let is_leap = year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let february = if is_leap { 29 } else { 28 };
    [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31][month % 12]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        let dates = [0, 951_782_399, 951_782_400, 1_709_251_199, 4_107_542_400].map(written);
        let expected = [
            "1970-01-01 00:00 UTC",
            "2000-02-28 23:59 UTC",
            "2000-02-29 00:00 UTC",
            "2024-02-29 23:59 UTC",
            "2100-03-01 00:00 UTC",
        ];
        assert_eq!(dates, expected);
    }
}
