//! The host's clock, in the zone that the guest's clock shows.

use std::time::Instant;

use anyhow::Context;
use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp};

use super::Base;

/// Where the time comes from.
pub(super) struct Wall {
    zone: TimeZone,
    /// A moment that is taken for another one.
    start: Option<(Instant, Timestamp)>,
}

impl Wall {
    pub(super) fn new(base: Base, start: Option<&str>) -> anyhow::Result<Self> {
        let parse = |text: &str| text.parse().with_context(|| format!("start time `{text}`"));
        let start: Option<Timestamp> = start.map(parse).transpose()?;
        // Read once: a jailed process does not see the zone's file any more.
        let zone = match base {
            Base::Utc => TimeZone::UTC,
            Base::Local => system_zone(),
        };
        Ok(Self { zone, start: start.map(|start| (Instant::now(), start)) })
    }

    /// Microseconds since 1970 as the zone's clocks on the wall count them.
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
        // The zone's rule of that moment: summer time begins while the guest runs.
        let offset = self.zone.to_offset(now).seconds();
        now.as_microsecond() + i64::from(offset) * 1_000_000
    }
}

/// The zone of `TZ` or of the host.
fn system_zone() -> TimeZone {
    TimeZone::try_system().unwrap_or_else(|error| {
        let zone = std::env::var("TZ").unwrap_or_default();
        tracing::warn!("no local time for the guest's clock, it shows UTC: TZ `{zone}`: {error}");
        TimeZone::UTC
    })
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn local_time_jumps_with_its_zone() {
        // Amsterdam's rule, written out, so that the test needs no zone files.
        let zone = TimeZone::posix("CET-1CEST,M3.5.0,M10.5.0/3").unwrap();
        let wall = Wall { zone, start: None };
        let shown = |text: &str| {
            let now: Timestamp = text.parse().unwrap();
            Timestamp::from_microsecond(wall.micros_at(now)).unwrap().to_string()
        };
        assert_eq!(shown("2026-03-29T00:59:59.5Z"), "2026-03-29T01:59:59.5Z");
        assert_eq!(shown("2026-03-29T01:00:00Z"), "2026-03-29T03:00:00Z");
        assert_eq!(shown("2026-10-25T00:59:59Z"), "2026-10-25T02:59:59Z");
        assert_eq!(shown("2026-10-25T01:00:00Z"), "2026-10-25T02:00:00Z");
    }

    #[test]
    fn a_fixed_start_goes_on_from_there() {
        let wall = Wall::new(Base::Utc, Some("1999-12-31T23:59:59Z")).unwrap();
        let first = wall.micros();
        assert!((946_684_799_000_000..946_684_809_000_000).contains(&first), "{first}");
        std::thread::sleep(std::time::Duration::from_millis(2));
        assert!(wall.micros() >= first + 2000);
    }
}
