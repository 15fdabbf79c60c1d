//! Time zones: Windows' names for those of the tz database (Unicode CLDR, supplemental
//! windowsZones, and the aliases of bcp47 timezone).
//!
//! `zones/zones.txt` is generated from the two files of CLDR beside it, and a test compares them:
//! `transom answers` needs no XML of CLDR at run time.

use super::release::Release::{self, Server2012R2, Server2016, Server2019, Server2022};

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

/// Zones that Windows got by updates after the media of old releases, and the first release that
/// has each from the start. Media of Windows 10 and 11 are newer than all of them, except those of
/// LTSB and LTSC before 2021, which are not told apart.
const NEW: [(&str, Release); 39] = [
    ("Aleutian Standard Time", Server2016),
    ("Altai Standard Time", Server2016),
    ("Astrakhan Standard Time", Server2016),
    ("Aus Central W. Standard Time", Server2016),
    ("Belarus Standard Time", Server2016),
    ("Bougainville Standard Time", Server2016),
    ("Chatham Islands Standard Time", Server2016),
    ("Cuba Standard Time", Server2016),
    ("Easter Island Standard Time", Server2016),
    ("Eastern Standard Time (Mexico)", Server2016),
    ("Haiti Standard Time", Server2016),
    ("Line Islands Standard Time", Server2016),
    ("Lord Howe Standard Time", Server2016),
    ("Marquesas Standard Time", Server2016),
    ("Norfolk Standard Time", Server2016),
    ("North Korea Standard Time", Server2016),
    ("Russia Time Zone 10", Server2016),
    ("Russia Time Zone 11", Server2016),
    ("Russia Time Zone 3", Server2016),
    ("Saint Pierre Standard Time", Server2016),
    ("Sakhalin Standard Time", Server2016),
    ("Tocantins Standard Time", Server2016),
    ("Tomsk Standard Time", Server2016),
    ("Transbaikal Standard Time", Server2016),
    ("Turks And Caicos Standard Time", Server2016),
    ("UTC-08", Server2016),
    ("UTC-09", Server2016),
    ("W. Mongolia Standard Time", Server2016),
    ("West Bank Standard Time", Server2016),
    ("Magallanes Standard Time", Server2019),
    ("Omsk Standard Time", Server2019),
    ("Sao Tome Standard Time", Server2019),
    ("Saratov Standard Time", Server2019),
    ("Sudan Standard Time", Server2019),
    ("UTC+13", Server2019),
    ("Qyzylorda Standard Time", Server2022),
    ("South Sudan Standard Time", Server2022),
    ("Volgograd Standard Time", Server2022),
    ("Yukon Standard Time", Server2022),
];

/// Whether the media of a release may lack a zone: Windows Setup stops at an unknown one.
pub fn is_newer(zone: &str, release: Release) -> bool {
    let media = [Server2012R2, Server2016, Server2019, Server2022];
    let age = |release: Release| match release {
        Release::Windows81 => Some(0),
        Release::HyperV2019 => Some(2),
        other => media.iter().position(|it| *it == other),
    };
    let first = NEW.iter().find(|(new, _)| *new == zone).map(|(_, first)| age(*first));
    age(release).is_some_and(|is| first.flatten().is_some_and(|first| is < first))
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
        for (zone, first) in NEW {
            assert!(known.contains(&zone), "{zone}");
            assert!(is_newer(zone, Release::Windows81) && !is_newer(zone, first), "{zone}");
            assert!(!is_newer(zone, Release::Windows11) && !is_newer(zone, Release::Server2025));
        }
        assert!(is_newer("Saratov Standard Time", Server2016));
        assert!(!is_newer("Omsk Standard Time", Release::HyperV2019));
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
