//! Computes the sizes of the machine from settings and host: the values of `half` and `max`,
//! minimum sizes, and conflicts between settings. A pure function of its arguments.

use host::size::Size;

use super::environment::ParsedEnvironment;
use super::host::Host;
use super::translate::Bus;
use super::value::{GIB, MIB, Secret, Share, Value};
use super::version::Version;
use super::{NetworkKind, Settings};
use crate::status::{self, Failure, Status};

/// The sizes of the machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sizes {
    /// Number of processors.
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
    mistakes.extend(check_network(settings).err());
    let mut notes = Vec::new();
    let bus = settings.disk.media.value;
    if input.names.contains("MEDIA_TYPE") && !matches!(bus, Bus::Usb | Bus::Auto | Bus::None) {
        notes.push(
            "MEDIA_TYPE: the drive is always at USB, for which every supported Windows has a driver"
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

fn in_mib(bytes: u64) -> String {
    Size(bytes / MIB * MIB).show()
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
    let usual = account.password == Secret("admin".into());
    if !input.names.contains("USERNAME") || !input.names.contains("PASSWORD") || usual {
        return Err(Failure::new(
            Status::Usage,
            format!(
                "DOMAIN={}: joining a domain needs an account of it: set USERNAME and PASSWORD",
                domain.show()
            ),
        ));
    }
    Ok(())
}

/// Notes on settings for the pod's own network that have no effect while the guest is on another.
fn without_effect(input: &ParsedEnvironment) -> Vec<String> {
    let names = ["IP", "MASK", "HOST_PORTS", "USER_PORTS"];
    let is_set = |name: &&str| input.settings.network.dhcp && input.names.contains(*name);
    names
        .into_iter()
        .filter(is_set)
        .map(|name| {
            format!(
                "{name} has no effect with DHCP=Y, because the guest is a host of the network \
                 itself, with all of its ports: leave it out"
            )
        })
        .collect()
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
mod test {
    use super::super::environment::read;
    use super::*;

    /// A host with eight processors, 16 GiB of free memory, and 100 GiB of free space.
    fn host() -> Host {
        let free_space = Some(100 * GIB);
        let further_space = [free_space, free_space, free_space, None, None];
        let [free, memory] = [16 * GIB; 2];
        let disk = None;
        Host {
            processors: 8,
            quota: None,
            free,
            memory,
            zfs: false,
            free_space,
            disk,
            further_space,
        }
    }

    fn settled(words: &[(&str, &str)], host: &Host) -> anyhow::Result<(Sizes, Vec<String>)> {
        let environment = words.iter().map(|(name, text)| (name.into(), text.into())).collect();
        settle(&read(&environment).unwrap(), host)
    }

    fn sizes(words: &[(&str, &str)], host: &Host) -> Sizes {
        settled(words, host).unwrap().0
    }

    fn refusal(words: &[(&str, &str)], host: &Host) -> (Status, String) {
        let error = settled(words, host).unwrap_err();
        (Status::of(&error), format!("{error:#}"))
    }

    #[test]
    fn nothing_said_is_the_reference_machine() {
        let (sizes, notes) = settled(&[], &host()).unwrap();
        let more = [Some(64 * GIB), Some(64 * GIB), Some(64 * GIB), None, None];
        assert_eq!(sizes, Sizes { processors: 2, memory: 4 * GIB, disk: 64 * GIB, more });
        assert_eq!(notes, [""; 0]);
    }

    #[test]
    fn shares_are_of_what_the_host_has() {
        let half = [("CPU_CORES", "half"), ("RAM_SIZE", "Half"), ("DISK_SIZE", "HALF")];
        let more = [Some(50 * GIB), Some(50 * GIB), Some(50 * GIB), None, None];
        let wanted = Sizes { processors: 4, memory: 8 * GIB, disk: 50 * GIB, more };
        assert_eq!(sizes(&half, &host()), wanted);
        let max = [("CPU_CORES", "max"), ("RAM_SIZE", "max"), ("DISK_SIZE", "max")];
        let memory = 16 * GIB - 1536 * MIB;
        let more = [Some(99 * GIB), Some(99 * GIB), Some(99 * GIB), None, None];
        let wanted = Sizes { processors: 8, memory, disk: 99 * GIB, more };
        assert_eq!(sizes(&max, &host()), wanted);
        // An existing disk keeps its size and needs no space.
        for (disk, size) in [(64 * GIB, "max"), (64 * GIB, "16G"), (8 * GIB, "half")] {
            let full = Host { free_space: Some(10 * GIB), disk: Some(disk), ..host() };
            let (sizes, notes) = settled(&[("DISK_SIZE", size)], &full).unwrap();
            assert_eq!((sizes.disk, notes.len()), (disk, usize::from(size == "16G")), "{notes:?}");
        }
        let second = sizes(&[("DISK2_SIZE", "10"), ("DISK3_SIZE", "max")], &host());
        assert_eq!(
            second.more.map(|it| it.map(|it| it / GIB)).to_vec(),
            [Some(10), Some(99), Some(64), None, None]
        );
    }

    #[test]
    fn the_largest_memory_leaves_less_where_there_is_little() {
        let all = |memory| all_of(&Host { free: memory, memory, ..host() });
        assert_eq!(all(16 * GIB), 16 * GIB - 1536 * MIB);
        assert_eq!(all(4 * GIB), 4 * GIB - 512 * MIB);
        assert_eq!(all(600 * MIB), 300 * MIB);
        assert_eq!(all(0), 0);
    }

    #[test]
    fn bare_numbers_have_the_unit_that_people_mean() {
        for (text, bytes) in [
            ("8", 8 * GIB),
            ("129", 14848 * MIB),
            ("4096", 4 * GIB),
            ("2.5g", 2560 * MIB),
            ("8 GB", 8 * GIB),
            ("3GiB", 3 * GIB),
        ] {
            assert_eq!(sizes(&[("RAM_SIZE", text)], &host()).memory, bytes, "{text}");
        }
        assert_eq!(sizes(&[("DISK_SIZE", "200")], &host()).disk, 200 * GIB);
        assert_eq!(sizes(&[("DISK_SIZE", "1T")], &host()).disk, 1024 * GIB);
    }

    #[test]
    fn memory_that_is_not_free_is_not_taken() {
        let (less, notes) = settled(&[("RAM_SIZE", "32G")], &host()).unwrap();
        assert_eq!(less.memory, 16 * GIB - 1536 * MIB);
        assert!(notes[0].contains("RAM_SIZE=32G: only 16G are free"), "{notes:?}");
        let unchecked = [("RAM_SIZE", "32G"), ("RAM_CHECK", "N")];
        let (all, notes) = settled(&unchecked, &host()).unwrap();
        assert_eq!((all.memory, notes.len()), (32 * GIB, 1));
        let zfs = Host { zfs: true, ..host() };
        assert_eq!(sizes(&[("RAM_SIZE", "32G")], &zfs).memory, 32 * GIB);
        let (near, notes) = settled(&[("RAM_SIZE", "15G")], &host()).unwrap();
        assert_eq!(near.memory, 15 * GIB);
        assert!(notes[0].contains("little is left"), "{notes:?}");
    }

    #[test]
    fn a_limit_of_the_pod_spares_nothing_for_the_host() {
        let of = |words: &[(&str, &str)], memory: u64| settled(words, &Host { memory, ..host() });
        let (sizes, notes) = of(&[("RAM_SIZE", "4G")], 5 * GIB - 200 * MIB).unwrap();
        assert_eq!((sizes.memory, notes), (4 * GIB, Vec::new()));
        assert_eq!(of(&[("RAM_SIZE", "max")], 8 * GIB).unwrap().0.memory, 8 * GIB - 512 * MIB);
        // Without a lower limit of the control group, the host's own memory is the limit.
        assert_eq!(of(&[("RAM_SIZE", "max")], 15 * GIB).unwrap().0.memory, 16 * GIB - 1536 * MIB);
        let (less, notes) = of(&[("RAM_SIZE", "5G")], 5 * GIB).unwrap();
        assert_eq!((less.memory, notes.len()), (5 * GIB - 512 * MIB, 1));
        let (all, notes) = of(&[("RAM_SIZE", "5G"), ("RAM_CHECK", "N")], 5 * GIB).unwrap();
        assert_eq!(all.memory, 5 * GIB);
        assert!(notes[0].contains("limit leaves 5G: raise it"), "{notes:?}");
    }

    #[test]
    fn too_little_is_an_error_that_says_how_much() {
        let (status, sentence) = refusal(&[("RAM_SIZE", "1G")], &host());
        assert_eq!(status, Status::Memory);
        assert!(sentence.contains("Windows 11 Pro needs at least 2G"), "{sentence}");
        let small = Host { memory: 2 * GIB, ..host() };
        assert_eq!(refusal(&[], &small).0, Status::Memory);
        let lowered = [("RAM_SIZE", "1G"), ("RAM_MINIMUM", "1G")];
        assert_eq!(sizes(&lowered, &host()).memory, GIB);
        assert_eq!(sizes(&[("RAM_SIZE", "1G"), ("VERSION", "2012")], &host()).memory, GIB);
        assert_eq!(refusal(&[("RAM_SIZE", "0")], &host()).0, Status::Memory);

        assert_eq!(refusal(&[("DISK_SIZE", "16G")], &host()).0, Status::Disk);
        assert_eq!(sizes(&[("DISK_SIZE", "16G"), ("VERSION", "10")], &host()).disk, 16 * GIB);
        let lowered = [("DISK_SIZE", "9G"), ("DISK_MINIMUM", "9G")];
        assert_eq!(sizes(&lowered, &host()).disk, 9 * GIB);
        let full = Host { free_space: Some(GIB / 2), ..host() };
        assert_eq!(refusal(&[("DISK_SIZE", "max")], &full).0, Status::Disk);
        assert_eq!(sizes(&[("DISK_SIZE", "1G"), ("DISK_DISABLE", "Y")], &host()).disk, 0);
    }

    #[test]
    fn processors_are_at_most_those_of_the_pod() {
        let (all, notes) = settled(&[("CPU_CORES", "64")], &host()).unwrap();
        assert_eq!((all.processors, notes.len()), (8, 1));
        let limited = Host { quota: Some(3), ..host() };
        assert_eq!(sizes(&[("CPU_CORES", "max")], &limited).processors, 3);
        assert_eq!(sizes(&[("CPU_CORES", "half")], &limited).processors, 1);
        let (four, notes) = settled(&[("CPU_CORES", "4")], &limited).unwrap();
        assert_eq!(four.processors, 4);
        assert!(notes[0].contains("set CPU_CORES=3"), "{notes:?}");
        assert_eq!(sizes(&[("CPU_CORES", "0")], &host()).processors, 1);
        assert_eq!(sizes(&[("SMP", "6,sockets=2"), ("CPU_CORES", "1")], &host()).processors, 6);
        let (sixteen, notes) = settled(&[("SMP", "16")], &host()).unwrap();
        assert_eq!((sixteen.processors, notes.len()), (16, 1));
    }

    #[test]
    fn a_domain_needs_an_account_and_excludes_a_workgroup() {
        let account = [("USERNAME", "me@corp"), ("PASSWORD", "x"), ("DOMAIN", "corp.example.com")];
        sizes(&account, &host());
        for words in [
            &[("DOMAIN", "corp")][..],
            &[("DOMAIN", "corp"), ("USERNAME", "me"), ("PASSWORD", "admin")],
            &[("DOMAIN_OU", "OU=x")],
            &[("DOMAIN", "corp"), ("WORKGROUP", "x")],
            &[("USERNAME", "me@corp")],
            &[("USERNAME", "Administrator")],
            &[("USERNAME", "a name of more than twenty letters")],
        ] {
            assert_eq!(refusal(words, &host()).0, Status::Usage, "{words:?}");
        }
    }

    #[test]
    fn ports_and_networks_do_not_collide() {
        let ports = [("VNC_PORT", "8006")];
        assert!(refusal(&ports, &host()).1.contains("both 8006"));
        sizes(&[("VNC_PORT", "8006"), ("WEB", "N")], &host());
        let status = refusal(&[("DHCP", "Y"), ("NETWORK", "user")], &host()).0;
        assert_eq!(status, Status::Unsupported);
        let dhcp = [("DHCP", "Y"), ("HOST_PORTS", "22"), ("IP", "172.30.0.9")];
        let notes = settled(&dhcp, &host()).unwrap().1;
        assert_eq!(notes.len(), 2, "{notes:?}");
        assert!(notes[1].starts_with("HOST_PORTS has no effect"), "{notes:?}");
        for edge in ["172.30.0.0", "172.30.0.255"] {
            assert_eq!(refusal(&[("IP", edge)], &host()).0, Status::Network);
        }
        sizes(&[("IP", "172.30.0.255"), ("MASK", "255.255.0.0")], &host());
    }

    #[test]
    fn what_is_too_small_is_told_together() {
        let words = [("RAM_SIZE", "1G"), ("DISK_SIZE", "1G"), ("DOMAIN_OU", "OU=x")];
        let error = settled(&words, &host()).unwrap_err();
        let sentences = status::sentences(&error);
        let starts = ["DOMAIN_OU ", "RAM_SIZE=1G: ", "DISK_SIZE=1G: "];
        assert!(sentences.iter().zip(starts).all(|(it, start)| it.starts_with(start)));
        assert_eq!((Status::of(&error), sentences.len()), (Status::Usage, 3));
    }

    #[test]
    fn the_probe_needs_little() {
        let small = Host { memory: GIB, free_space: None, ..host() };
        let probe = [("VERSION", "probe"), ("RAM_SIZE", "64M"), ("DISK_SIZE", "max")];
        let sizes = sizes(&probe, &small);
        assert_eq!((sizes.memory, sizes.disk), (64 * MIB, 0));
    }
}
