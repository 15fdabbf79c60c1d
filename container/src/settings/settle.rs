//! Computes the sizes of the machine from settings and host: the values of `half` and `max`,
//! minimum sizes, and conflicts between settings. A pure function of its arguments.

use host::size::Size;

use super::environment::ParsedEnvironment;
use super::host::Host;
use super::translate::Bus;
use super::value::{GIB, MIB, Secret, Share, Value, in_mib};
use super::version::Version;
use super::{NetworkKind, Pod, Settings, Shutdown};
use crate::status::{self, Failure, Status};

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sizes {
    pub processors: u32,
    /// Bytes of memory.
    pub memory: u64,
    /// Bytes of the first disk. Zero without one.
    pub disk: u64,
    /// Bytes of the second to the sixth disk. Nothing if its folder is not mounted.
    pub more: [Option<u64>; 5],
}

/// The sizes, and notes on them for the user.
///
/// # Errors
///
/// If a size is below its minimum, or two settings conflict. The error has the exit status of the
/// reference image.
pub fn settle(input: &ParsedEnvironment, host: &Host) -> anyhow::Result<(Sizes, Vec<String>)> {
    let settings = &input.settings;
    let mut mistakes = Vec::new();
    mistakes.extend(check_account(input).err());
    mistakes.extend(check_key(&input.settings.pod).err());
    mistakes.extend(check_network(settings).err());
    let mut notes = Vec::new();
    let bus = settings.disk.media.value;
    if matches!(bus, Bus::Scsi | Bus::Blk | Bus::Nvme) {
        notes.push(
            "MEDIA_TYPE: a CD drive is at SATA or USB: this one is at SATA, for which every \
             supported Windows has a driver"
                .to_owned(),
        );
    }
    let processors = processors(settings, host, &mut notes);
    let memory = memory(settings, host, &mut notes);
    notes.extend(without_effect(input));
    let disk = disk(settings, host, &mut notes);
    let (memory, disk) = match (memory, disk) {
        (Ok(memory), Ok(disk)) if mistakes.is_empty() => (memory, disk),
        (memory, disk) => {
            mistakes.extend(memory.err().into_iter().chain(disk.err()));
            status::all(mistakes)?;
            (0, 0)
        }
    };
    let mut more = [None; 5];
    let folders = settings.storage.more.iter().zip(host.further_space);
    for (size, (own, space)) in more.iter_mut().zip(folders) {
        let own = own.map_or(settings.storage.size.0, |own| own.0);
        let some = !settings.disk.disable && settings.windows.version != Version::Probe;
        *size = space.filter(|_| some).map(|space| share_of_space(own, space));
    }
    Ok((Sizes { processors, memory, disk, more }, notes))
}

fn processors(settings: &Settings, host: &Host, notes: &mut Vec<String>) -> u32 {
    let there = host.processors.max(1);
    if let Some(topology) = &settings.processor.topology {
        let count = u32::from(topology.count);
        if count > there {
            notes.push(format!(
                "SMP={}: the pod may use only {there} processors, and the guest will stutter: set \
                 SMP to at most {there}",
                topology.show()
            ));
        }
        return count;
    }
    let usable = there.min(host.quota.unwrap_or(u32::MAX));
    let wanted = match settings.processor.cores.0 {
        Share::Max => usable,
        Share::Half => usable / 2,
        Share::Exactly(count) => count.0,
    };
    if wanted == 0 && settings.processor.cores.0 != Share::Half {
        notes.push("CPU_CORES=0: a machine has a processor at least, and gets 1".to_owned());
    }
    let wanted = wanted.max(1);
    if wanted > there {
        notes.push(format!(
            "CPU_CORES={wanted}: the pod may use only {there} processors, and the machine gets \
             {there}"
        ));
        return there;
    }
    if let Some(quota) = host.quota.filter(|quota| wanted > *quota) {
        notes.push(format!(
            "CPU_CORES={wanted}: the pod's CPU limit is {quota}, and the guest will stutter: raise \
             the limit, or set CPU_CORES={quota}"
        ));
    }
    wanted
}

/// Memory that stays free on the host when the machine takes all.
const SPARE: u64 = 1536 * MIB;
const SPARE_LITTLE: u64 = 512 * MIB;
const THREE_GIB: u64 = 3 * GIB;
/// Memory that the pod needs beside the machine's.
const MARGIN: u64 = 500 * MIB;

/// The memory for RAM_SIZE=max, counted as the reference image does. The memory within our control
/// group's limit is ours alone, so only our own programs need a part of it.
fn all_of(host: &Host) -> u64 {
    let little = |free: u64| if free < GIB { free / 2 } else { free - SPARE_LITTLE };
    let taken = match host.free.saturating_sub(SPARE) {
        0..THREE_GIB => little(host.free),
        much => much,
    };
    taken.min(little(host.memory)) / MIB * MIB
}

fn memory(settings: &Settings, host: &Host, notes: &mut Vec<String>) -> anyhow::Result<u64> {
    let given = settings.memory.size.show();
    let fail = |sentence: String| Failure::new(Status::Memory, sentence);
    let free = host.memory;
    let mut wanted = match settings.memory.size.0 {
        Share::Max => all_of(host),
        Share::Half => free / 2 / MIB * MIB,
        Share::Exactly(size) => size.0 / MIB * MIB,
    };
    let short = wanted.saturating_add(MARGIN) > free;
    let exact = matches!(settings.memory.size.0, Share::Exactly(_));
    if exact && short && settings.memory.check && !host.zfs {
        let less = all_of(host);
        if less < wanted {
            notes.push(format!(
                "RAM_SIZE={given}: only {} are free, and the machine gets {}",
                in_mib(free),
                in_mib(less)
            ));
            wanted = less;
        }
    } else if exact && short && free < host.free {
        notes.push(format!(
            "RAM_SIZE={given}: the pod's memory limit leaves {}: raise it, or lower RAM_SIZE",
            in_mib(free)
        ));
    } else if exact && wanted.saturating_add(SPARE) > host.free {
        notes.push(format!(
            "RAM_SIZE={given}: {} are free, so little is left for the host: lower RAM_SIZE if it \
             swaps",
            in_mib(host.free)
        ));
    }
    let (needs, _) = settings.windows.version.needs();
    let minimum = settings.memory.minimum.map_or(needs, |minimum| minimum.0);
    if wanted < minimum {
        let name = settings.windows.version.name();
        return Err(fail(format!(
            "RAM_SIZE={given}: {name} needs at least {}, and would get {}: raise RAM_SIZE, free \
             memory on the host, or lower RAM_MINIMUM",
            in_mib(minimum),
            in_mib(wanted)
        )));
    }
    Ok(wanted)
}

/// Space on the volume that stays free.
const RESERVED_SPACE: u64 = GIB;

fn share_of_space(share: Share<Size>, space: u64) -> u64 {
    match share {
        Share::Exactly(size) => size.0 / MIB * MIB,
        Share::Half => space / 2 / MIB * MIB,
        Share::Max => space.saturating_sub(RESERVED_SPACE) / MIB * MIB,
    }
}

fn disk(settings: &Settings, host: &Host, notes: &mut Vec<String>) -> anyhow::Result<u64> {
    // The probe has no disk.
    if settings.disk.disable || settings.windows.version == Version::Probe {
        return Ok(0);
    }
    let given = settings.storage.size.show();
    let size = share_of_space(settings.storage.size.0, host.free_space.unwrap_or(0));
    if let Some(there) = host.disk {
        if size < there && matches!(settings.storage.size.0, Share::Exactly(_)) {
            notes.push(format!(
                "DISK_SIZE={given}: the disk has {} and cannot shrink",
                in_mib(there)
            ));
        }
        return Ok(size.max(there));
    }
    let (_, needs) = settings.windows.version.needs();
    let minimum = settings.storage.minimum.map_or(needs, |minimum| minimum.0);
    if size < minimum {
        let name = settings.windows.version.name();
        return Err(Failure::new(
            Status::Disk,
            format!(
                "DISK_SIZE={given}: {name} needs at least {}, and would get {}: raise DISK_SIZE, \
                 free space on the volume, or lower DISK_MINIMUM",
                in_mib(minimum),
                in_mib(size)
            ),
        ));
    }
    Ok(size)
}

fn check_key(pod: &Pod) -> anyhow::Result<()> {
    let sentence = match pod.snapshot_key {
        Some(_) if pod.idle.is_some() => {
            "IDLE and SNAPSHOT_KEY_FILE are both set, but a machine that sleeps reads its memory \
             from the volume, where it is not encrypted: leave one of them out"
        }
        Some(_) if pod.shutdown == Shutdown::Migrate => {
            "SHUTDOWN=migrate and SNAPSHOT_KEY_FILE are both set, but the pods find each other on \
             the volume, so somebody who can write there could get the machine's memory: set \
             SHUTDOWN=suspend, or leave the key out"
        }
        _ => return Ok(()),
    };
    Err(Failure::new(Status::Usage, sentence))
}

fn check_account(input: &ParsedEnvironment) -> anyhow::Result<()> {
    let account = &input.settings.account;
    let refuse = |sentence: &str| Err(Failure::new(Status::Usage, sentence));
    let Some(domain) = &account.domain else {
        if account.unit.is_some() {
            return refuse("DOMAIN_OU needs a domain: set DOMAIN too, or leave DOMAIN_OU out");
        }
        return account.user.check_local().map_err(|error| {
            let file = input.files.contains("USERNAME");
            let shown = if file { "_FILE".into() } else { format!("={}", account.user.show()) };
            Failure::new(Status::Usage, format!("USERNAME{shown}: {error}"))
        });
    };
    if account.workgroup.is_some() {
        return refuse("DOMAIN and WORKGROUP are both set: leave one of them out");
    }
    let usual = account.password == Secret("admin".into()) || account.user.is_usual();
    let named = ["USERNAME", "PASSWORD"].iter().all(|name| input.names.contains(*name));
    let sentence = match account.user.is_of(&domain.0) {
        _ if usual || !named => {
            "joining a domain needs an account of it: set USERNAME and PASSWORD"
        }
        false => "USERNAME names another domain: give the name alone, or user@domain",
        true => return Ok(()),
    };
    Err(Failure::new(Status::Usage, format!("DOMAIN={}: {sentence}", domain.show())))
}

/// Notes on KVM=N, and on settings for the pod's own network that have no effect while the guest is
/// on another.
fn without_effect(input: &ParsedEnvironment) -> Vec<String> {
    let emulation = (!input.settings.processor.kvm).then(|| {
        "KVM=N has no effect: emulation is not supported, and the machine runs on KVM: leave it out"
            .to_owned()
    });
    let names = ["IP", "MASK", "HOST_PORTS", "USER_PORTS"];
    let is_set = |name: &&str| input.settings.network.dhcp && input.names.contains(*name);
    let unused = names.into_iter().filter(is_set).map(|name| {
        format!(
            "{name} has no effect with DHCP=Y, because the guest is a host of the network itself, \
             with all of its ports: leave it out"
        )
    });
    emulation.into_iter().chain(unused).collect()
}

fn check_network(settings: &Settings) -> anyhow::Result<()> {
    let (network, screen) = (&settings.network, &settings.screen);
    if network.dhcp && network.kind != NetworkKind::Nat {
        return Err(Failure::new(
            Status::Unsupported,
            format!(
                "DHCP=Y is not possible with NETWORK={}: leave one of them out",
                network.kind.show()
            ),
        ));
    }
    if let Some(address) = network.address.filter(|own| network.mask.is_edge(*own)) {
        return Err(Failure::new(
            Status::Network,
            format!(
                "IP={address}: the first and the last address of a network are reserved: give \
                 another one"
            ),
        ));
    }
    if screen.web && settings.vnc().map(u32::from) == Some(screen.web_port.0) {
        return Err(Failure::new(
            Status::Usage,
            format!(
                "VNC_PORT and WEB_PORT are both {}: give one of them another port",
                screen.web_port.0
            ),
        ));
    }
    Ok(())
}

#[cfg(test)]
mod test;
