//! Points in time as text: UTC stamps for reports and folder names, and the dates of HTTP headers.

use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] =
    ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
const DAY_S: i64 = 86_400;

/// A moment as `2026-11-29T15:04:05Z`.
pub fn utc(at: SystemTime) -> String {
    let seconds = at.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() as i64);
    let (year, month, day) = civil_from_days(seconds.div_euclid(DAY_S));
    let clock = seconds.rem_euclid(DAY_S);
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", clock / 3600, clock / 60 % 60, clock % 60)
}

/// The same moment in a form that suits a folder name: `20261129T150405Z`.
pub fn utc_compact(at: SystemTime) -> String {
    utc(at).replace(['-', ':'], "")
}

/// Unix seconds of an IMF-fixdate such as `Sun, 06 Nov 1994 08:49:37 GMT` (RFC 9110, 5.6.7).
pub fn parse_http_date(text: &str) -> Option<i64> {
    let fields: Vec<&str> = text.split_whitespace().collect();
    let [_, day, month, year, time, "GMT"] = fields[..] else { return None };
    let day: i64 = day.parse().ok()?;
    let month = MONTHS.iter().position(|name| *name == month)? as i64 + 1;
    let year: i64 = year.parse().ok()?;
    let clock: Vec<i64> = time.split(':').map(|part| part.parse().ok()).collect::<Option<_>>()?;
    let [hour, minute, second] = clock[..] else { return None };
    Some(days_from_civil(year, month, day) * DAY_S + hour * 3600 + minute * 60 + second)
}

/// Days since 1970-01-01 of a date of the Gregorian calendar. Years are counted from March, so that the leap day
/// is the last of its year.
fn days_from_civil(year: i64, month: i64, day: i64) -> i64 {
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let leap_days = year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400);
    365 * year + leap_days + (153 * month + 2) / 5 + day - 1 - 719_468
}

/// The date of a day number: the inverse of [`days_from_civil`], by stepping back from an estimate.
fn civil_from_days(days: i64) -> (i64, i64, i64) {
    let mut year = 1970 + days / 365;
    while days_from_civil(year, 1, 1) > days {
        year -= 1;
    }
    let mut month = 12;
    while days_from_civil(year, month, 1) > days {
        month -= 1;
    }
    (year, month, days - days_from_civil(year, month, 1) + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn known_moments_are_written_and_read() {
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        assert_eq!(utc(at(0)), "1970-01-01T00:00:00Z");
        assert_eq!(utc(at(784_111_777)), "1994-11-06T08:49:37Z");
        assert_eq!(utc_compact(at(1_709_164_801)), "20240229T000001Z");
        assert_eq!(parse_http_date("Sun, 06 Nov 1994 08:49:37 GMT"), Some(784_111_777));
        assert_eq!(parse_http_date("yesterday"), None);
    }

    #[test]
    fn every_day_of_four_centuries_is_found_again() {
        for days in 0..146_097 {
            let (year, month, day) = civil_from_days(days);
            assert_eq!(days_from_civil(year, month, day), days);
            assert!((1..=12).contains(&month) && (1..=31).contains(&day));
        }
    }
}
