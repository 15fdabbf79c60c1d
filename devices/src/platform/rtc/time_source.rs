//! The host's clock, in the time zone of the guest's clock.

use std::fs;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, anyhow, ensure};
use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp};

use super::Base;

pub(super) struct TimeSource {
    zone: TimeZone,
    /// The configured start time, and the moment when the machine started.
    start: Option<(Instant, Timestamp)>,
}

impl TimeSource {
    pub(super) fn new(base: Base, start: Option<&str>) -> anyhow::Result<Self> {
        let parse = |text: &str| text.parse().with_context(|| format!("start time `{text}`"));
        let start: Option<Timestamp> = start.map(parse).transpose()?;
        // The zone is read only here, because a jailed process cannot open the zone's file later.
        let zone = match base {
            Base::Utc => TimeZone::UTC,
            Base::Local => system_zone(),
        };
        Ok(Self { zone, start: start.map(|start| (Instant::now(), start)) })
    }

    /// Microseconds since 1970 in the zone's local time.
    pub(super) fn micros(&self) -> i64 {
        self.micros_at(self.now())
    }

    fn now(&self) -> Timestamp {
        match self.start {
            None => Timestamp::now(),
            Some((since, start)) => {
                let passed = SignedDuration::try_from(since.elapsed());
                let now = passed.ok().and_then(|passed| start.checked_add(passed).ok());
                now.unwrap_or(Timestamp::MAX)
            }
        }
    }

    fn micros_at(&self, now: Timestamp) -> i64 {
        // Use the offset at that moment, because daylight saving time may begin while the guest
        // runs.
        let offset = self.zone.to_offset(now).seconds();
        now.as_microsecond() + i64::from(offset) * 1_000_000
    }
}

/// The time zone of `TZ` or of the host.
fn system_zone() -> TimeZone {
    let name = std::env::var_os("TZ").map(|name| name.to_string_lossy().into_owned());
    zone(name.as_deref()).unwrap_or_else(|error| {
        tracing::warn!("the guest's clock shows UTC instead of local time: {error:#}");
        TimeZone::UTC
    })
}

/// Reads the time zone in `TZ` (POSIX.1-2024, 8.3), or the host's zone if `TZ` is not set.
///
/// This reads only the named file. The library would examine all existing zones, which takes longer
/// than the rest of a machine's start.
fn zone(name: Option<&str>) -> anyhow::Result<TimeZone> {
    let Some(name) = name else {
        let host = fs::read("/etc/localtime").ok();
        return host.map_or(Ok(TimeZone::UTC), |bytes| read("/etc/localtime", &bytes));
    };
    let name = name.strip_prefix(':').unwrap_or(name);
    if name.is_empty() {
        return Ok(TimeZone::UTC);
    }
    ensure!(!name.contains(".."), "TZ `{name}` is not a time zone");
    // `join` keeps an absolute path.
    match fs::read(Path::new("/usr/share/zoneinfo").join(name)) {
        Ok(bytes) => read(name, &bytes),
        Err(_) if name == "UTC" => Ok(TimeZone::UTC),
        Err(_) => TimeZone::posix(name).map_err(|error| anyhow!("TZ `{name}`: {error}")),
    }
}

fn read(name: &str, bytes: &[u8]) -> anyhow::Result<TimeZone> {
    TimeZone::tzif(name, bytes).map_err(|error| anyhow!("time zone `{name}`: {error}"))
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn local_time_follows_daylight_saving() {
        // Amsterdam's rule in full, so that the test needs no zone files.
        let zone = TimeZone::posix("CET-1CEST,M3.5.0,M10.5.0/3").unwrap();
        let time_source = TimeSource { zone, start: None };
        let shown = |text: &str| {
            let now: Timestamp = text.parse().unwrap();
            Timestamp::from_microsecond(time_source.micros_at(now)).unwrap().to_string()
        };
        assert_eq!(shown("2026-03-29T00:59:59.5Z"), "2026-03-29T01:59:59.5Z");
        assert_eq!(shown("2026-03-29T01:00:00Z"), "2026-03-29T03:00:00Z");
        assert_eq!(shown("2026-10-25T00:59:59Z"), "2026-10-25T02:59:59Z");
        assert_eq!(shown("2026-10-25T01:00:00Z"), "2026-10-25T02:00:00Z");
    }

    #[test]
    fn a_time_zone_is_a_rule_or_a_file() {
        let now: Timestamp = "2026-07-01T00:00:00Z".parse().unwrap();
        let hours = |name| zone(Some(name)).map(|zone| zone.to_offset(now).seconds() / 3600);
        assert_eq!(hours("CET-1CEST,M3.5.0,M10.5.0/3").unwrap(), 2);
        assert_eq!(hours(":EST5").unwrap(), -5);
        assert_eq!((hours("").unwrap(), hours("UTC").unwrap()), (0, 0));
        for bad in ["Atlantis/Capital", "../../../etc/passwd", "/etc/passwd", "/dev"] {
            let said = format!("{:#}", zone(Some(bad)).unwrap_err());
            assert!(said.contains(bad), "{said}");
        }
        if Path::new("/usr/share/zoneinfo/Asia/Tokyo").exists() {
            assert_eq!(hours("Asia/Tokyo").unwrap(), 9);
        } else {
            eprintln!("not tested: zones by name, because this host has no zone files");
        }
    }

    #[test]
    fn a_fixed_start_time_advances() {
        let time_source = TimeSource::new(Base::Utc, Some("1999-12-31T23:59:59Z")).unwrap();
        let first = time_source.micros();
        assert!((946_684_799_000_000..946_684_809_000_000).contains(&first), "{first}");
        std::thread::sleep(std::time::Duration::from_millis(2));
        assert!(time_source.micros() >= first + 2000);
    }
}
