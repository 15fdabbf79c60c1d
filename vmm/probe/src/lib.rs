//! Guest programs that are part of `vmm`: the probe, which checks the machine from within and
//! reports on COM1, and the first process of a small Linux.
//!
//! vmm/probe/guest has the probe's sources and describes its command line and its report. The probe
//! runs on every KVM, including a paravirtual-only one.

/// The probe as an ELF file: a PVH kernel that loads at 1 MiB.
pub const IMAGE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/probe.elf"));

/// A program for Linux that needs no library: the first process of `vmm doctor --run`'s guest.
pub const INIT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/init.elf"));

// Modules of the guest that need no hardware, so that they can be tested on the host.
#[cfg(test)]
#[path = "../guest/random.rs"]
mod random;
#[cfg(test)]
#[path = "../guest/report.rs"]
mod report;

#[cfg(test)]
mod test {
    use super::random::Random;
    use super::report::{Finding, Report, Verdict};
    use super::{IMAGE, INIT};

    fn field(offset: usize, width: usize) -> u64 {
        IMAGE[offset..offset + width].iter().rev().fold(0, |sum, &byte| sum << 8 | u64::from(byte))
    }

    /// Type, file offset, physical address, size in the file and size in memory of each segment.
    fn segments() -> Vec<[u64; 5]> {
        let first = usize::try_from(field(32, 8)).expect("a file offset");
        let header = |index: u64| first + 56 * usize::try_from(index).expect("a small index");
        let parts = [(0, 4), (8, 8), (24, 8), (32, 8), (40, 8)];
        (0..field(56, 2))
            .map(|index| parts.map(|(offset, width)| field(header(index) + offset, width)))
            .collect()
    }

    #[test]
    fn image_is_a_small_file_that_loads_at_one_mib() {
        assert_eq!(IMAGE[..5], *b"\x7fELF\x02");
        // A fifth of it is the page: 21 KiB of glyphs in four sizes, and the code that draws them.
        assert!(IMAGE.len() < 176 << 10, "{} bytes", IMAGE.len());
        let loads: Vec<_> = segments().into_iter().filter(|segment| segment[0] == 1).collect();
        assert_eq!(loads.len(), 1);
        let [_, _, address, in_file, in_memory] = loads[0];
        assert_eq!(address, 1 << 20);
        assert!(in_file < in_memory && in_memory < 1 << 20, "{in_memory} bytes");
    }

    #[test]
    fn init_is_a_small_program_without_interpreter() {
        assert_eq!(INIT[..5], *b"\x7fELF\x02");
        assert!(INIT.len() < 32 << 10, "{} bytes", INIT.len());
        // ET_EXEC, and no program header of type PT_INTERP or PT_DYNAMIC.
        assert_eq!(INIT[16], 2);
        let header = |index: usize| 64 + 56 * index;
        let kinds: Vec<u8> = (0..INIT[56].into()).map(|index| INIT[header(index)]).collect();
        assert!(kinds.contains(&1) && !kinds.contains(&2) && !kinds.contains(&3), "{kinds:?}");
    }

    #[test]
    fn image_has_its_pvh_entry_in_a_loaded_segment() {
        let note = segments().into_iter().find(|segment| segment[0] == 4).expect("a note");
        let at = usize::try_from(note[1]).expect("a file offset");
        assert_eq!([field(at, 4), field(at + 4, 4), field(at + 8, 4)], [4, 4, 18]);
        assert_eq!(IMAGE[at + 12..at + 16], *b"Xen\0");
        let load = segments().into_iter().find(|segment| segment[0] == 1).expect("a segment");
        assert!((load[2]..load[2] + load[3]).contains(&field(at + 16, 4)));
    }

    #[test]
    fn equal_seeds_give_equal_numbers() {
        let numbers = |seed| {
            let mut random = Random::new(seed);
            [(); 64].map(|()| random.next())
        };
        assert_eq!(numbers(7), numbers(7));
        assert_ne!(numbers(7), numbers(8));
        assert!(numbers(0).iter().all(|&number| number != 0));
    }

    #[test]
    fn numbers_below_a_limit_cover_the_range() {
        let mut random = Random::new(1);
        let mut seen = [0u32; 10];
        for _ in 0..1000 {
            seen[usize::try_from(random.below(10)).expect("a small number")] += 1;
        }
        assert!(seen.iter().all(|&count| count > 50), "{seen:?}");
    }

    #[test]
    fn report_has_text_lines_and_json() {
        let (mut report, mut lines, mut json) = (Report::new(), String::new(), String::new());
        let strange = "a \"b\" \\ \u{1}";
        report.add(Finding::info("cpu").text("brand", strange).number("n", 7), &mut lines);
        report.add(Finding::check("good", true).hex("base", 0x1f), &mut lines);
        report.json(&mut json).expect("a string takes all");
        assert!(lines.ends_with("pass  good          base=0x1f\n"), "{lines}");
        let read: serde_json::Value = serde_json::from_str(&json).expect("JSON");
        assert!(json.starts_with("{\"probe\":1,") && json.ends_with("}\n"), "{json}");
        assert_eq!(read["ok"], true);
        assert_eq!(read["findings"][0]["brand"], strange);
        assert_eq!(read["findings"][1]["base"], "0x1f");
    }

    #[test]
    fn findings_can_be_looked_up() {
        let (mut report, mut lines) = (Report::new(), String::new());
        let finding = Finding::check("disk", true).text("kind", "nvme").number("requests", 7);
        report.add(finding.flag("quick", true).hex("base", 0x1f), &mut lines);
        report.add(Finding::info("disk").number("requests", 8), &mut lines);
        let found = report.find("disk").expect("the first of them");
        assert_eq!((found.name(), found.verdict()), ("disk", Verdict::Pass));
        assert_eq!(
            (found.text_of("kind"), found.text_of("requests"), found.text_of("none")),
            ("nvme", "", "")
        );
        let counts = ["requests", "quick", "base", "kind", "none"].map(|key| found.count(key));
        assert_eq!(counts, [7, 1, 0x1f, 0, 0]);
        assert!(report.find("net").is_none() && report.is_ok());
        assert_eq!(report.findings().count(), 2);
    }

    #[test]
    fn a_finding_passes_only_if_all_its_checks_pass() {
        let line = |finding: Finding| {
            let mut line = String::new();
            finding.line(&mut line).expect("a string takes all");
            line
        };
        assert!(line(Finding::check("all", true).and(true)).starts_with("pass  all"));
        assert!(line(Finding::check("second", true).and(false)).starts_with("fail  second"));
        assert!(line(Finding::check("first", false).and(true)).starts_with("fail  first"));
    }

    #[test]
    fn one_failure_fails_the_report_even_when_the_list_is_full() {
        let (mut report, mut lines, mut json) = (Report::new(), String::new(), String::new());
        for _ in 0..100 {
            report.add(Finding::info("more").flag("yes", true), &mut lines);
        }
        report.add(Finding::check("bad", false), &mut lines);
        report.json(&mut json).expect("a string takes all");
        let read: serde_json::Value = serde_json::from_str(&json).expect("JSON");
        assert_eq!(read["ok"], false);
        assert_eq!(read["dropped"], 5);
        assert_eq!(lines.lines().count(), 101);
    }
}
