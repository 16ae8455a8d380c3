//! UTC time as run ids write it.

use std::time::{SystemTime, UNIX_EPOCH};

/// `20260810T123456Z`: sorts as text in the order of time.
///
/// Days are turned into a date by the era arithmetic of the proleptic Gregorian calendar (Howard Hinnant,
/// `civil_from_days`). A clock before 1970 reads as 1970.
pub fn utc_compact(time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let shifted = days + 719_468; // days since 0000-03-01, so that a leap day ends its year
    let era = shifted / 146_097;
    let day_of_era = shifted % 146_097;
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let march_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * march_month + 2) / 5 + 1;
    let month = if march_month < 10 { march_month + 3 } else { march_month - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    format!("{year:04}{month:02}{day:02}T{:02}{:02}{:02}Z", second / 3600, second / 60 % 60, second % 60)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn dates_around_leap_days_and_centuries_are_right() {
        for (seconds, text) in [
            (0, "19700101T000000Z"),
            (951_782_399, "20000228T235959Z"),
            (951_782_400, "20000229T000000Z"),
            (1_709_164_800, "20240229T000000Z"),
            (1_786_365_296, "20260810T123456Z"),
            (4_107_542_400, "21000301T000000Z"),
        ] {
            assert_eq!(utc_compact(UNIX_EPOCH + Duration::from_secs(seconds)), text);
        }
    }
}
