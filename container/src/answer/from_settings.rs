//! The answers that the settings make.

use super::release::Release;
use super::target::Target;
use super::{Account, Answers, Finish, Lacks, Locale, Machine, Membership, locale, zones};
use crate::settings::settle::Sizes;
use crate::settings::translate::Bus;
use crate::settings::value::{GIB, Secret, Value as _};
use crate::settings::{Compat, Settings};

/// Requirements of Windows 11.
const MEMORY: u64 = 4 * GIB;
const DISK: u64 = 64 * GIB;
const PROCESSORS: u32 = 2;

/// The answers for a version of Windows, and warnings, one sentence each.
pub fn answers(settings: &Settings, target: &Target, machine: Machine) -> (Answers, Vec<String>) {
    let mut warnings: Vec<_> = target.warning.iter().cloned().collect();
    let windows = &settings.windows;
    if !target.remote {
        let name = &target.image.name;
        warnings.push(format!("{name} accepts no remote desktops: set EDITION=pro for those"));
    }
    let mut locale = locale(settings, target.release, &mut warnings);
    if let Some(language) = &target.language {
        locale.language.clone_from(language);
    }
    let answers = Answers {
        release: target.release,
        image: target.image.clone(),
        locale,
        account: account(settings),
        membership: membership(settings),
        computer: settings.account.host.as_ref().map(|host| host.0.clone()),
        screen: (windows.width.0, windows.height.0),
        finish: Finish {
            key: windows.key.clone(),
            command: windows.command.clone(),
            log: windows.log,
            share: false,
        },
        machine,
        installer: windows.installer,
        as_reference: settings.pod.compat == Compat::Dockur,
    };
    (answers, warnings)
}

fn account(settings: &Settings) -> Account {
    let account = &settings.account;
    Account {
        user: account.user.0.clone(),
        password: Secret(account.password.0.clone()),
        autologin: account.autologin,
    }
}

fn membership(settings: &Settings) -> Membership {
    let account = &settings.account;
    match (&account.domain, &account.workgroup) {
        (Some(domain), _) => {
            Membership::Domain { name: domain.0.clone(), unit: account.unit.clone() }
        }
        (None, Some(workgroup)) => Membership::Workgroup(workgroup.0.clone()),
        (None, None) => Membership::Default,
    }
}

fn locale(settings: &Settings, release: Release, warnings: &mut Vec<String>) -> Locale {
    let windows = &settings.windows;
    let language = windows.language.0.culture;
    let region = windows.region.as_ref().map_or(language, |region| &region.0);
    let keyboard = windows.keyboard.as_ref().map(locale::keyboard);
    let zone = settings.machine.zone.as_ref();
    let found = match zone {
        Some(zone) => zones::windows(&zone.0),
        // The reference image leaves the zone to Windows.
        None if settings.pod.compat == Compat::Dockur => None,
        None => zones::of_culture(region).and_then(zones::windows),
    };
    let known = found.filter(|zone| !zones::is_newer(zone, release));
    if let Some(zone) = zone.filter(|_| known.is_none()) {
        let out = match found {
            Some(_) => "set it in Windows when its updates are installed",
            None => "set a name like Europe/Berlin",
        };
        warnings.push(format!(
            "TZ={}: this Windows has no time zone for it, and uses its own: {out}",
            zone.show()
        ));
    }
    Locale {
        language: language.to_owned(),
        region: region.to_owned(),
        keyboard: keyboard.unwrap_or_else(|| language.to_owned()),
        zone: known,
        // The machine's clock follows TZ, and is in UTC without it, or if ARGUMENTS say so.
        universal_clock: settings.pod.compat != Compat::Dockur
            && (settings.has_utc_clock() || zone.is_none() && found.is_some()),
    }
}

/// The machine that the settings describe, as Windows Setup sees it. `bus` is that of its disks.
pub fn machine(settings: &Settings, sizes: &Sizes, bus: Bus) -> Machine {
    let secure_boot = settings.machine.boot.is_secure();
    Machine {
        disk: u32::from(matches!(bus, Bus::Scsi | Bus::Blk)),
        lacks: Lacks {
            tpm: !settings.machine.tpm.unwrap_or(secure_boot),
            secure_boot: !secure_boot,
            memory: sizes.memory < MEMORY,
            disk: sizes.disk < DISK,
            processors: sizes.processors < PROCESSORS,
        },
    }
}
