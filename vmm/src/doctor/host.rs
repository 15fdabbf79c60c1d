//! Facts about the host in a report: processor, kernel, KVM's modules, memory. None of them names
//! the machine, its owner or its place.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde::Serialize;

/// Flags of /proc/cpuinfo that matter for guests.
const FLAGS: &[&str] = &[
    "vmx",
    "svm",
    "hypervisor",
    "ept",
    "npt",
    "vpid",
    "flexpriority",
    "tpr_shadow",
    "vnmi",
    "x2apic",
    "avic",
    "x2avic",
    "vgif",
    "nrip_save",
    "flushbyasid",
    "decodeassists",
    "tsc_scale",
    "constant_tsc",
    "nonstop_tsc",
    "tsc_known_freq",
    "tsc_deadline_timer",
    "rdtscp",
    "arat",
    "smep",
    "smap",
    "umip",
    "pdpe1gb",
    "avx2",
    "avx512f",
    "la57",
    "user_shstk",
    "sev",
    "tdx_guest",
];
const MODULES: [&str; 4] = ["kvm", "kvm_amd", "kvm_intel", "kvm_pvm"];
/// Limits for the text of files that other programs made.
const MAX_PARAMETERS: usize = 64;
const MAX_TEXT: usize = 80;

#[derive(Debug, Serialize)]
pub(super) struct Host {
    processor: Processor,
    /// The kernel's release, as `uname -r` prints it.
    pub(super) kernel: String,
    /// Parameters of KVM's modules. An entry is there if the module is loaded.
    pub(super) modules: BTreeMap<&'static str, BTreeMap<String, String>>,
    memory: Memory,
}

#[derive(Debug, Default, Serialize)]
struct Processor {
    vendor: String,
    name: String,
    family: String,
    model: String,
    stepping: String,
    microcode: String,
    flags: Vec<String>,
    /// Features of Intel's virtualization.
    vmx_flags: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Memory {
    total_mib: u64,
    available_mib: u64,
    /// When the kernel uses huge pages by itself: `always`, `madvise` or `never`.
    transparent: String,
    huge_pages: Vec<HugePages>,
}

#[derive(Debug, Serialize)]
struct HugePages {
    size_kib: u64,
    total: u64,
    free: u64,
}

impl Host {
    pub(super) fn examine() -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let meminfo = read("/proc/meminfo");
        let transparent = read("/sys/kernel/mm/transparent_hugepage/enabled");
        let transparent = transparent.split(['[', ']']).nth(1).unwrap_or_default();
        Self {
            processor: Processor::of(&read("/proc/cpuinfo")),
            kernel: short(&read("/proc/sys/kernel/osrelease")),
            modules: modules(Path::new("/sys/module")),
            memory: Memory {
                total_mib: kib(&meminfo, "MemTotal") >> 10,
                available_mib: kib(&meminfo, "MemAvailable") >> 10,
                transparent: short(transparent),
                huge_pages: huge_pages(Path::new("/sys/kernel/mm/hugepages")),
            },
        }
    }

    pub(super) fn has_flag(&self, name: &str) -> bool {
        let Processor { flags, vmx_flags, .. } = &self.processor;
        flags.iter().chain(vmx_flags).any(|flag| flag == name)
    }

    #[cfg(test)]
    pub(super) fn set_flags(&mut self, flags: &str) {
        self.processor.flags = flags.split_ascii_whitespace().map(str::to_owned).collect();
        self.processor.vmx_flags.clear();
    }

    /// The lines of the report for people.
    pub(super) fn show(&self) -> String {
        let Processor { vendor, name, family, model, stepping, microcode, .. } = &self.processor;
        let mut text = format!(
            "\nProcessor\n  {vendor} {name}, family {family}, model {model}, stepping {stepping}, \
             microcode {microcode}\n{}",
            wrapped(&self.processor.flags.join(" "))
        );
        if !self.processor.vmx_flags.is_empty() {
            text += &wrapped(&format!("vmx: {}", self.processor.vmx_flags.join(" ")));
        }
        text += &format!("\nKernel {}\n", self.kernel);
        for (module, parameters) in &self.modules {
            let all: Vec<_> =
                parameters.iter().map(|(key, value)| format!("{key}={value}")).collect();
            text += &wrapped(&format!("{module}: {}", all.join(" ")));
        }
        let Memory { total_mib, available_mib, transparent, huge_pages } = &self.memory;
        text += &format!(
            "\nMemory\n  {available_mib} of {total_mib} MiB are available; transparent huge pages: \
             {transparent}\n"
        );
        for HugePages { size_kib, total, free } in huge_pages {
            text +=
                &format!("  huge pages of {} MiB: {free} of {total} are free\n", size_kib >> 10);
        }
        text
    }
}

impl Processor {
    /// Reads the first processor; the others differ only in numbers that no guest depends on.
    fn of(cpuinfo: &str) -> Self {
        let first = cpuinfo.split("\n\n").next().unwrap_or_default();
        let pairs: BTreeMap<_, _> = first
            .lines()
            .filter_map(|line| line.split_once(':'))
            .map(|(key, value)| (key.trim(), value.trim()))
            .collect();
        let text = |key: &str| short(pairs.get(key).copied().unwrap_or_default());
        let words =
            |key: &str| pairs.get(key).copied().unwrap_or_default().split_ascii_whitespace();
        let flags: Vec<_> = words("flags").collect();
        let known = FLAGS.iter().filter(|flag| flags.contains(flag));
        Self {
            vendor: text("vendor_id"),
            name: text("model name"),
            family: text("cpu family"),
            model: text("model"),
            stepping: text("stepping"),
            microcode: text("microcode"),
            flags: known.map(|&flag| flag.to_owned()).collect(),
            vmx_flags: words("vmx flags").take(MAX_PARAMETERS).map(short).collect(),
        }
    }
}

/// The number of a line of /proc/meminfo.
fn kib(meminfo: &str, key: &str) -> u64 {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
    line.and_then(|line| line.trim().strip_suffix(" kB")?.parse().ok()).unwrap_or(0)
}

fn modules(folder: &Path) -> BTreeMap<&'static str, BTreeMap<String, String>> {
    let loaded = MODULES.into_iter().filter(|name| folder.join(name).is_dir());
    loaded.map(|name| (name, parameters(&folder.join(name).join("parameters")))).collect()
}

/// Parameters that this user may read.
fn parameters(folder: &Path) -> BTreeMap<String, String> {
    let files = fs::read_dir(folder).into_iter().flatten().flatten().take(MAX_PARAMETERS);
    files
        .filter_map(|file| {
            let value = fs::read_to_string(file.path()).ok()?;
            Some((short(&file.file_name().to_string_lossy()), short(&value)))
        })
        .collect()
}

/// Sizes of huge pages of which there are some.
fn huge_pages(folder: &Path) -> Vec<HugePages> {
    let sizes = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut all: Vec<_> = sizes
        .filter_map(|size| {
            let name = size.file_name().into_string().ok()?;
            let size_kib = name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
            let number =
                |file| fs::read_to_string(size.path().join(file)).ok()?.trim().parse().ok();
            let [total, free] = [number("nr_hugepages")?, number("free_hugepages")?];
            (total > 0).then_some(HugePages { size_kib, total, free })
        })
        .collect();
    all.sort_by_key(|pages| pages.size_kib);
    all
}

/// Printable text of limited length.
pub(super) fn short(text: &str) -> String {
    let printable = text.trim().chars().map(|it| if it.is_control() { ' ' } else { it });
    printable.take(MAX_TEXT).collect()
}

/// Indents a text, in lines of at most 100 columns.
pub(super) fn wrapped(text: &str) -> String {
    let (mut lines, mut column) = (String::new(), 0);
    for word in text.split_ascii_whitespace() {
        if column == 0 || column + word.len() > 96 {
            lines += if lines.is_empty() { "  " } else { "\n    " };
            column = 4;
        } else {
            lines += " ";
            column += 1;
        }
        lines += word;
        column += word.len();
    }
    if lines.is_empty() { lines } else { lines + "\n" }
}

#[cfg(test)]
mod test {
    use super::*;

    const CPUINFO: &str = "\
processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 85
model name\t: Intel(R) Xeon(R)
stepping\t: 7
microcode\t: 0x5003604
flags\t\t: fpu vmx ept x2apic made_up
vmx flags\t: vnmi apicv

processor\t: 1
vendor_id\t: Another
";

    #[test]
    fn the_first_processor_is_described_without_unknown_flags() {
        let processor = Processor::of(CPUINFO);
        assert_eq!((&*processor.vendor, &*processor.model), ("GenuineIntel", "85"));
        assert_eq!(processor.flags, ["vmx", "ept", "x2apic"]);
        assert_eq!(processor.vmx_flags, ["vnmi", "apicv"]);
    }

    #[test]
    fn parameters_of_loaded_modules_are_read_and_cut() {
        let folder = tempfile::tempdir().unwrap();
        let parameters = folder.path().join("kvm_amd/parameters");
        fs::create_dir_all(&parameters).unwrap();
        fs::write(parameters.join("avic"), "N\n").unwrap();
        fs::write(parameters.join("long"), "x".repeat(1000)).unwrap();
        let found = modules(folder.path());
        assert_eq!(found.keys().copied().collect::<Vec<_>>(), ["kvm_amd"]);
        assert_eq!(found["kvm_amd"]["avic"], "N");
        assert_eq!(found["kvm_amd"]["long"].len(), MAX_TEXT);
    }

    #[test]
    fn long_lists_are_wrapped() {
        let text = wrapped(&"word ".repeat(60));
        assert!(text.lines().count() > 2 && text.lines().all(|line| line.len() <= 100), "{text}");
        assert_eq!(wrapped(""), "");
    }
}
