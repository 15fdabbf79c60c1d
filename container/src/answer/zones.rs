//! Time zones: Windows' names for those of the tz database (Unicode CLDR, supplemental
//! windowsZones, and the aliases of bcp47 timezone).
//!
//! `zones/zones.txt` is generated from the two files of CLDR beside it, and a test compares them:
//! `transom answers` needs no XML of CLDR at run time.

use super::release::Release::{
    self, HyperV2019, Server2012R2, Server2016, Server2019, Server2022, Server2025, Windows10,
    Windows11, Windows81,
};

/// Lines `Windows' name;territory;names of the tz database`, and `=name alias…`.
const TABLE: &str = include_str!("zones/zones.txt");

/// Names that are newer than the table, or that CLDR lacks, with an older name for the same clock.
const OTHER_NAMES: [(&str, &str); 7] = [
    ("Europe/Kyiv", "Europe/Kiev"),
    ("America/Ciudad_Juarez", "America/Denver"),
    ("America/Coyhaique", "America/Punta_Arenas"),
    ("CET", "Europe/Brussels"),
    ("MET", "Europe/Brussels"),
    ("EET", "Europe/Athens"),
    ("WET", "Europe/Lisbon"),
];

/// The usual zone of territories that have several. CLDR's primary zones, the capital's for
/// others, and for the United States that of Windows itself.
const PRIMARY: [(&str, &str); 26] = [
    ("AU", "Australia/Sydney"),
    ("BR", "America/Sao_Paulo"),
    ("CA", "America/Toronto"),
    ("CD", "Africa/Kinshasa"),
    ("CL", "America/Santiago"),
    ("CN", "Asia/Shanghai"),
    ("EC", "America/Guayaquil"),
    ("ES", "Europe/Madrid"),
    ("FM", "Pacific/Ponape"),
    ("GL", "America/Godthab"),
    ("ID", "Asia/Jakarta"),
    ("KI", "Pacific/Tarawa"),
    ("KZ", "Asia/Almaty"),
    ("MN", "Asia/Ulaanbaatar"),
    ("MX", "America/Mexico_City"),
    ("NZ", "Pacific/Auckland"),
    ("PF", "Pacific/Tahiti"),
    ("PG", "Pacific/Port_Moresby"),
    ("PT", "Europe/Lisbon"),
    ("RU", "Europe/Moscow"),
    ("UA", "Europe/Kiev"),
    ("UM", "Pacific/Wake"),
    ("US", "America/Los_Angeles"),
    ("AQ", "Antarctica/McMurdo"),
    ("UZ", "Asia/Tashkent"),
    ("MY", "Asia/Kuala_Lumpur"),
];

/// Zones that Windows got by updates after the media of old releases: those that Server 2016, 2019
/// and 2022 have from the start, and the release before lacks. Media of Windows 10 and 11 are newer
/// than all of them, except those of LTSB and LTSC before 2021, which are not told apart.
const NEW_2016: [&str; 29] = [
    "Aleutian Standard Time",
    "Altai Standard Time",
    "Astrakhan Standard Time",
    "Aus Central W. Standard Time",
    "Belarus Standard Time",
    "Bougainville Standard Time",
    "Chatham Islands Standard Time",
    "Cuba Standard Time",
    "Easter Island Standard Time",
    "Eastern Standard Time (Mexico)",
    "Haiti Standard Time",
    "Line Islands Standard Time",
    "Lord Howe Standard Time",
    "Marquesas Standard Time",
    "Norfolk Standard Time",
    "North Korea Standard Time",
    "Russia Time Zone 10",
    "Russia Time Zone 11",
    "Russia Time Zone 3",
    "Saint Pierre Standard Time",
    "Sakhalin Standard Time",
    "Tocantins Standard Time",
    "Tomsk Standard Time",
    "Transbaikal Standard Time",
    "Turks And Caicos Standard Time",
    "UTC-08",
    "UTC-09",
    "W. Mongolia Standard Time",
    "West Bank Standard Time",
];
const NEW_2019: [&str; 6] = [
    "Magallanes Standard Time",
    "Omsk Standard Time",
    "Sao Tome Standard Time",
    "Saratov Standard Time",
    "Sudan Standard Time",
    "UTC+13",
];
const NEW_2022: [&str; 4] = [
    "Qyzylorda Standard Time",
    "South Sudan Standard Time",
    "Volgograd Standard Time",
    "Yukon Standard Time",
];

/// Whether the media of a release may lack a zone: Windows Setup stops at an unknown one.
pub fn is_newer(zone: &str, release: Release) -> bool {
    let lacked: &[&[&str]] = match release {
        Windows81 | Server2012R2 => &[&NEW_2016, &NEW_2019, &NEW_2022],
        Server2016 => &[&NEW_2019, &NEW_2022],
        Server2019 | HyperV2019 => &[&NEW_2022],
        Windows10 | Windows11 | Server2022 | Server2025 => &[],
    };
    lacked.iter().any(|zones| zones.contains(&zone))
}

/// A line of the table that maps.
fn rows() -> impl Iterator<Item = (&'static str, &'static str, &'static str)> {
    TABLE.lines().filter_map(|line| {
        let (windows, rest) = line.split_once(';')?;
        let (territory, names) = rest.split_once(';')?;
        Some((windows, territory, names))
    })
}

/// All names of the tz database that the table has, aliases included.
pub fn names() -> impl Iterator<Item = &'static str> {
    let aliases = TABLE.lines().filter_map(|line| line.strip_prefix('='));
    let listed = rows().map(|(.., names)| names).chain(aliases);
    listed.flat_map(|names| names.split(' ')).chain(OTHER_NAMES.map(|(name, _)| name))
}

/// Windows' name of a time zone. Rules such as `CET-1CEST` have none.
pub fn windows(name: &str) -> Option<&'static str> {
    let name = name.strip_prefix(':').unwrap_or(name);
    let other = OTHER_NAMES.iter().find(|(newer, _)| newer.eq_ignore_ascii_case(name));
    let name = other.map_or(name, |(_, older)| older);
    let names = |name: &str, list: &str| list.split(' ').any(|it| it.eq_ignore_ascii_case(name));
    let aliases = TABLE.lines().filter_map(|line| line.strip_prefix('='));
    let group = aliases.into_iter().find(|group| names(name, group));
    let name = group.and_then(|group| group.split(' ').next()).unwrap_or(name);
    rows().find(|(_, _, list)| names(name, list)).map(|(windows, ..)| windows)
}

/// The usual zone of a culture's territory: the name of the tz database.
pub fn of_culture(culture: &str) -> Option<&'static str> {
    let is_territory = |part: &&str| part.len() == 2 || part.bytes().all(|it| it.is_ascii_digit());
    let territory = culture.split('-').skip(1).find(is_territory)?;
    let of = |(_, own, _): &(&str, &str, &str)| own.eq_ignore_ascii_case(territory);
    if let Some((_, name)) = PRIMARY.iter().find(|(own, _)| own.eq_ignore_ascii_case(territory)) {
        return Some(name);
    }
    rows().find(of).and_then(|(_, _, names)| names.split(' ').next())
}

#[cfg(test)]
mod test {
    use std::collections::BTreeMap;
    use std::fmt::Write as _;

    use super::super::parse::{Node, read};
    use super::*;

    #[test]
    fn old_media_lack_new_zones() {
        let known: Vec<_> = rows().map(|(windows, ..)| windows).collect();
        let new: [(&[&str], _); 3] =
            [(&NEW_2016, Server2016), (&NEW_2019, Server2019), (&NEW_2022, Server2022)];
        for (zones, first) in new {
            for zone in zones {
                assert!(known.contains(zone), "{zone}");
                assert!(is_newer(zone, Windows81) && !is_newer(zone, first), "{zone}");
                assert!(!is_newer(zone, Windows11) && !is_newer(zone, Server2025), "{zone}");
            }
        }
        assert!(is_newer("Saratov Standard Time", Server2016));
        assert!(!is_newer("Omsk Standard Time", HyperV2019));
        assert!(!is_newer("W. Europe Standard Time", Server2012R2));
    }

    /// The elements of a file of CLDR, without its document type, which our parser refuses.
    fn elements(text: &str) -> Vec<Node> {
        let start = text.find("<!DOCTYPE").unwrap();
        let end = start + text[start..].find('>').unwrap() + 1;
        read(&format!("{}{}", &text[..start], &text[end..])).unwrap()
    }

    #[test]
    fn the_table_is_generated_from_cldr() {
        let mut made = String::new();
        let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        for zone in elements(include_str!("zones/windowsZones.xml")) {
            let attribute = |name: &str| zone.attribute(name).unwrap();
            if zone.name == "mapZone" {
                let (windows, territory) = (attribute("other"), attribute("territory"));
                writeln!(made, "{windows};{territory};{}", words(attribute("type"))).unwrap();
            }
        }
        for zone in elements(include_str!("zones/timezone.xml")) {
            let names = words(zone.attribute("alias").unwrap_or_default());
            if zone.name == "type" && names.contains(' ') {
                writeln!(made, "={names}").unwrap();
            }
        }
        assert!(made == TABLE, "zones.txt must be:\n{made}");
    }

    #[test]
    fn names_of_the_tz_database_become_those_of_windows() {
        for (name, wanted) in [
            ("Asia/Seoul", Some("Korea Standard Time")),
            ("Europe/Berlin", Some("W. Europe Standard Time")),
            (":Europe/Berlin", Some("W. Europe Standard Time")),
            ("europe/berlin", Some("W. Europe Standard Time")),
            ("Asia/Kolkata", Some("India Standard Time")),
            ("Europe/Kyiv", Some("FLE Standard Time")),
            ("US/Pacific", Some("Pacific Standard Time")),
            ("America/New_York", Some("Eastern Standard Time")),
            ("UTC", Some("UTC")),
            ("Etc/UTC", Some("UTC")),
            ("CET", Some("Romance Standard Time")),
            ("CET-1CEST,M3.5.0,M10.5.0/3", None),
            ("Mars/Olympus", None),
            ("", None),
        ] {
            assert_eq!(windows(name), wanted, "{name}");
        }
    }

    /// Zones without a clock of Windows' own.
    const NONE: [&str; 2] = ["Antarctica/Troll", "Factory"];

    #[test]
    fn every_zone_of_this_host_is_known() {
        let Ok(database) = std::fs::read_to_string("/usr/share/zoneinfo/tzdata.zi") else {
            let reason = "the host has no tz database";
            return skip::not_run("every_zone_of_this_host_is_known", reason);
        };
        for line in database.lines() {
            let words: Vec<_> = line.split(' ').collect();
            let name = match words[..] {
                ["L", _, name] | ["Z", name, ..] => name,
                _ => continue,
            };
            assert_eq!(windows(name).is_none(), NONE.contains(&name), "{name}");
        }
    }

    #[test]
    fn territories_have_a_usual_zone() {
        for (culture, wanted) in [
            ("ko-KR", Some("Asia/Seoul")),
            ("en-US", Some("America/Los_Angeles")),
            ("sr-Latn-RS", Some("Europe/Belgrade")),
            ("de-AT", Some("Europe/Vienna")),
            ("pt-BR", Some("America/Sao_Paulo")),
            ("es-419", None),
            ("ko", None),
        ] {
            assert_eq!(of_culture(culture), wanted, "{culture}");
        }
        let mut territories: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for (windows, territory, _) in rows().filter(|(_, it, _)| !["001", "ZZ"].contains(it)) {
            territories.entry(territory).or_default().push(windows);
        }
        for (territory, zones) in territories {
            let usual = of_culture(&format!("xx-{territory}")).and_then(windows);
            assert!(usual.is_some_and(|it| zones.contains(&it)), "{territory}");
            let is_primary = PRIMARY.iter().any(|(own, _)| *own == territory);
            assert!(is_primary || zones.len() == 1, "{territory}");
        }
    }
}
