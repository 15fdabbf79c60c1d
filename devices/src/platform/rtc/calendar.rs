//! Converts between seconds since 1970 and the time registers of the clock chip.

// The time registers, in the order of the data sheet.
pub(super) const SECONDS: usize = 0x00;
pub(super) const SECONDS_ALARM: usize = 0x01;
pub(super) const MINUTES: usize = 0x02;
pub(super) const MINUTES_ALARM: usize = 0x03;
pub(super) const HOURS: usize = 0x04;
pub(super) const HOURS_ALARM: usize = 0x05;
pub(super) const WEEKDAY: usize = 0x06;
pub(super) const DAY: usize = 0x07;
pub(super) const MONTH: usize = 0x08;
pub(super) const YEAR: usize = 0x09;
/// The century is not part of the chip: PCs keep it here, as the FADT states.
pub(super) const CENTURY: usize = 0x32;

/// All registers that the clock counts.
pub(super) const TIME: [usize; 8] = [SECONDS, MINUTES, HOURS, WEEKDAY, DAY, MONTH, YEAR, CENTURY];

pub(super) const MINUTE: i64 = 60;
pub(super) const HOUR: i64 = 60 * MINUTE;
const A_DAY: i64 = 24 * HOUR;
/// Bit 7 of the hours in 12-hour mode.
const PM: u8 = 0x80;
/// Alarm bytes from this value on match every time.
const ANY: u8 = 0xc0;

/// The format of numbers: the bits "DM" and "24/12" of register B.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Format {
    pub(super) binary: bool,
    pub(super) hours24: bool,
}

impl Format {
    /// Encodes a number below 100.
    fn write(self, number: i64) -> u8 {
        let number = number.rem_euclid(100);
        let written = if self.binary { number } else { number / 10 * 16 + number % 10 };
        u8::try_from(written).expect("99 is at most 0x99")
    }

    fn read(self, byte: u8) -> i64 {
        i64::from(if self.binary { byte } else { (byte >> 4) * 10 + (byte & 0xf) })
    }

    fn write_hour(self, hour: i64) -> u8 {
        if self.hours24 {
            return self.write(hour);
        }
        let half = self.write((hour + 11) % 12 + 1);
        if hour >= 12 { half | PM } else { half }
    }

    fn read_hour(self, byte: u8) -> i64 {
        if self.hours24 {
            return self.read(byte);
        }
        self.read(byte & !PM) % 12 + if byte & PM == 0 { 0 } else { 12 }
    }

    /// The value of a time register at `seconds` since 1970.
    pub(super) fn register(self, seconds: i64, register: usize) -> u8 {
        let days = seconds.div_euclid(A_DAY);
        let of_day = seconds.rem_euclid(A_DAY);
        let (year, month, day) = date(days);
        match register {
            SECONDS => self.write(of_day % MINUTE),
            MINUTES => self.write(of_day / MINUTE % 60),
            HOURS => self.write_hour(of_day / HOUR),
            // 1 January 1970 was a Thursday. Sunday is 1.
            WEEKDAY => self.write((days + 4).rem_euclid(7) + 1),
            DAY => self.write(day),
            MONTH => self.write(month),
            YEAR => self.write(year),
            _ => self.write(year.div_euclid(100)),
        }
    }

    /// The time in the registers, in seconds since 1970. Days beyond the end of a month count into
    /// the next month, so that all register contents are a valid time.
    pub(super) fn seconds(self, bytes: &[u8]) -> i64 {
        let number = |register: usize| self.read(bytes[register]);
        let month = number(MONTH).clamp(1, 12);
        let year = number(CENTURY) * 100 + number(YEAR);
        let days = days(year, month) + number(DAY).max(1) - 1;
        let hour = self.read_hour(bytes[HOURS]);
        days * A_DAY + hour * HOUR + number(MINUTES) * MINUTE + number(SECONDS)
    }

    /// The first time after `seconds` that matches the alarm registers, if any.
    pub(super) fn next_alarm(self, bytes: &[u8], seconds: i64) -> Option<i64> {
        let any = |register: usize, read: i64| (bytes[register] < ANY).then_some(read);
        let second = any(SECONDS_ALARM, self.read(bytes[SECONDS_ALARM]));
        let minute = any(MINUTES_ALARM, self.read(bytes[MINUTES_ALARM]));
        let hour = any(HOURS_ALARM, self.read_hour(bytes[HOURS_ALARM]));
        let differs = |wanted: Option<i64>, is: i64| wanted.is_some_and(|wanted| wanted != is);
        let end = seconds + A_DAY;
        let mut at = seconds + 1;
        while at <= end {
            let of_day = at.rem_euclid(A_DAY);
            // Whole hours and minutes are skipped, so there are at most about 140 steps.
            at = if differs(hour, of_day / HOUR) {
                at - at.rem_euclid(HOUR) + HOUR
            } else if differs(minute, of_day / MINUTE % 60) {
                at - at.rem_euclid(MINUTE) + MINUTE
            } else if differs(second, of_day % MINUTE) {
                at + 1
            } else {
                return Some(at);
            };
        }
        None
    }
}

/// Days from 1970 to the first of a month (Gregorian calendar, H. Hinnant's `days_from_civil`).
fn days(year: i64, month: i64) -> i64 {
    // Years begin in March, so that the leap day is the last day.
    let year = if month <= 2 { year - 1 } else { year };
    let era = year.div_euclid(400);
    let of_era = year.rem_euclid(400);
    let of_year = (153 * ((month + 9) % 12) + 2) / 5;
    era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468
}

/// Year, month and day: the inverse of `days`.
fn date(days: i64) -> (i64, i64, i64) {
    let days = days + 719_468;
    let era = days.div_euclid(146_097);
    let of_era = days.rem_euclid(146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    (era * 400 + year + i64::from(month <= 2), month, day)
}

#[cfg(test)]
mod test {
    use super::*;

    const BCD24: Format = Format { binary: false, hours24: true };
    const BINARY12: Format = Format { binary: true, hours24: false };

    fn registers(format: Format, seconds: i64) -> Vec<u8> {
        let mut bytes = vec![0; 128];
        TIME.iter().for_each(|it| bytes[*it] = format.register(seconds, *it));
        bytes
    }

    #[test]
    fn dates_match_those_of_jiff() {
        // Thirteen years in steps of a prime number of seconds, across a leap day and a century.
        for step in 0..4000_i64 {
            let seconds = 946_684_800 - 6 * 365 * A_DAY + step * 102_559;
            let then = jiff::Timestamp::from_second(seconds).unwrap();
            let then = then.to_zoned(jiff::tz::TimeZone::UTC);
            let text = then.strftime("%S%M%H%d%m%y").to_string();
            let bytes = registers(BCD24, seconds);
            let said: Vec<String> = [SECONDS, MINUTES, HOURS, DAY, MONTH, YEAR]
                .iter()
                .map(|it| format!("{:02x}", bytes[*it]))
                .collect();
            assert_eq!(said.concat(), text);
            assert_eq!(i64::from(bytes[CENTURY]), 0x19 + 7 * i64::from(then.year() >= 2000));
            let weekday = then.weekday().to_sunday_one_offset();
            assert_eq!(i64::from(bytes[WEEKDAY]), i64::from(weekday));
            for format in [BCD24, BINARY12] {
                assert_eq!(format.seconds(&registers(format, seconds)), seconds);
            }
        }
    }

    #[test]
    fn twelve_hour_mode_handles_noon_and_midnight() {
        let hours = [0, 1, 11, 12, 13, 23];
        let bcd12 = Format { binary: false, hours24: false };
        let written: Vec<u8> = hours.iter().map(|hour| bcd12.write_hour(*hour)).collect();
        assert_eq!(written, [0x12, 0x01, 0x11, 0x92, 0x81, 0x91]);
        let read: Vec<i64> = written.iter().map(|byte| bcd12.read_hour(*byte)).collect();
        assert_eq!(read, hours);
    }

    #[test]
    fn any_register_content_is_a_valid_time() {
        for byte in 0..=255 {
            for format in [BCD24, BINARY12] {
                let seconds = format.seconds(&[byte; 128]);
                registers(format, seconds);
                format.next_alarm(&[byte; 128], seconds);
            }
        }
    }

    #[test]
    fn alarms_compare_only_the_fields_that_are_set() {
        let at = |hour: u8, minute: u8, second: u8| {
            let mut bytes = vec![0; 128];
            (bytes[HOURS_ALARM], bytes[MINUTES_ALARM], bytes[SECONDS_ALARM]) =
                (hour, minute, second);
            bytes
        };
        let now = 100 * A_DAY + 12 * HOUR + 34 * MINUTE + 56;
        let next = |bytes: Vec<u8>| BCD24.next_alarm(&bytes, now).map(|it| it - now);
        assert_eq!(next(at(0xff, 0xff, 0xc0)), Some(1), "each second");
        assert_eq!(next(at(0xff, 0xff, 0x55)), Some(59), "each minute");
        assert_eq!(next(at(0xff, 0x34, 0x56)), Some(HOUR), "each hour");
        assert_eq!(next(at(0x12, 0x34, 0x56)), Some(A_DAY), "each day");
        assert_eq!(next(at(0x12, 0x34, 0x57)), Some(1));
        assert_eq!(next(at(0x12, 0xff, 0x00)), Some(4));
        assert_eq!(next(at(0x11, 0x00, 0x00)), Some(A_DAY - HOUR - 34 * MINUTE - 56));
        assert_eq!(next(at(0x25, 0x00, 0x00)), None, "never");
    }
}
