//! The answers that the settings make.

use super::release::{Release, image};
use super::{Account, Answers, Finish, Lacks, Locale, Machine, Membership, locale, zones};
use crate::settings::settle::Sizes;
use crate::settings::translate::Bus;
use crate::settings::value::{GIB, Secret, Value as _};
use crate::settings::version::{Product, Version};
use crate::settings::{Compat, Settings};
use crate::status::{Failure, Status};

/// Requirements of Windows 11.
const MEMORY: u64 = 4 * GIB;
const DISK: u64 = 64 * GIB;
const PROCESSORS: u32 = 2;

/// The product that an answer file is for.
///
/// # Errors
///
/// If VERSION names a medium or the probe.
pub fn product(version: &Version) -> anyhow::Result<(&'static Product, Release)> {
    let refuse = |sentence: &str| {
        Err(Failure::new(Status::Version, format!("VERSION={}: {sentence}", version.show())))
    };
    match version {
        Version::Probe => refuse("the probe needs no answer file: set it to a version of Windows"),
        Version::Url(_) | Version::File(_) => refuse(
            "the Windows of this medium is known only when it is read: set it to a version of \
             Windows, such as 11",
        ),
        Version::Windows(product) => match Release::of(product.id) {
            Some(release) => Ok((product, release)),
            None => refuse("it cannot be installed unattended: set MANUAL=Y"),
        },
    }
}

/// The answers for a version of Windows, and warnings, one sentence each.
pub fn answers(
    settings: &Settings,
    (product, release): (&Product, Release),
    machine: Machine,
) -> (Answers, Vec<String>) {
    let mut warnings = Vec::new();
    let windows = &settings.windows;
    let edition = windows.edition.as_ref().map(|edition| edition.0.as_str());
    let (image, known) = image(product.id, release, edition);
    if let Some(edition) = edition.filter(|_| !known) {
        warnings.push(format!(
            "EDITION={edition}: {} has no such edition: {} is installed",
            product.name, image.name
        ));
    }
    if image.name.contains(" Home") || image.name == "Windows 8.1" {
        let name = &image.name;
        warnings.push(format!("{name} accepts no remote desktops: set EDITION=pro for those"));
    }
    let locale = locale(settings, &mut warnings);
    let answers = Answers {
        release,
        image,
        locale,
        account: account(settings),
        membership: membership(settings),
        computer: settings.account.host.as_ref().map(|host| host.0.clone()),
        screen: (windows.width.0, windows.height.0),
        finish: Finish {
            key: windows.key.clone(),
            command: windows.command.clone(),
            log: windows.log,
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

fn locale(settings: &Settings, warnings: &mut Vec<String>) -> Locale {
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
    if let Some(zone) = zone.filter(|_| found.is_none()) {
        warnings.push(format!(
            "TZ={}: Windows has no time zone for it, and uses its own: set a name like \
             Europe/Berlin",
            zone.show()
        ));
    }
    Locale {
        language: language.to_owned(),
        region: region.to_owned(),
        keyboard: keyboard.unwrap_or_else(|| language.to_owned()),
        zone: found,
        // The machine's clock follows TZ, and is in UTC without it.
        universal_clock: zone.is_none() && found.is_some(),
    }
}

/// The machine that the settings describe, as Windows Setup sees it.
pub fn machine(settings: &Settings, sizes: &Sizes) -> Machine {
    let secure_boot = settings.machine.boot.is_secure();
    let has_driver = !matches!(settings.disk.controller.value, Bus::Scsi | Bus::Blk);
    Machine {
        disk: u32::from(!has_driver),
        lacks: Lacks {
            tpm: !settings.machine.tpm.unwrap_or(secure_boot),
            secure_boot: !secure_boot,
            memory: sizes.memory < MEMORY,
            disk: sizes.disk < DISK,
            processors: sizes.processors < PROCESSORS,
        },
    }
}
