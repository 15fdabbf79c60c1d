//! Evaluates the tables that the guest saw with ACPICA's `acpiexec`, as each version of Windows: it
//! asks for all `_OSI` strings up to its own.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::process::Command;

use anyhow::{Context, ensure};
use tempfile::TempDir;

/// The `_OSI` strings of Windows, in the order of its versions, from Vista to 11.
pub(crate) const VERSIONS: [&str; 17] = [
    "Windows 2006",
    "Windows 2006.1",
    "Windows 2006 SP1",
    "Windows 2006 SP2",
    "Windows 2009",
    "Windows 2012",
    "Windows 2013",
    "Windows 2015",
    "Windows 2016",
    "Windows 2017",
    "Windows 2017.2",
    "Windows 2018",
    "Windows 2018.2",
    "Windows 2019",
    "Windows 2020",
    "Windows 2021",
    "Windows 2022",
];
/// Objects of every device that has them.
const OBJECTS: [&str; 6] = ["_STA", "_HID", "_UID", "_ADR", "_CRS", "_PRT"];
/// `_OSC` of a host bridge (PCI Firmware 3.3, 4.5.1): all that a system may ask for.
const OSC: &str = "evaluate \\_SB.PCI0._OSC (5B 4D DB 33 F7 1F 1C 40 96 57 74 41 C0 3D D7 66) 1 3 \
                   (00 00 00 00 1F 00 00 00 1F 00 00 00)";
/// `_DSM`, function 0: PCI, the TPM's physical presence, and clearing memory.
const DSM: [&str; 3] = [
    "(D0 37 C9 E5 53 35 7A 4D 91 17 EA 4D 19 C3 43 4D)",
    "(A6 FA DD 3D 1B 36 B4 4E A4 24 8D 10 08 9D 16 53)",
    "(ED 54 60 37 13 CC 75 46 90 1C 47 56 D7 F2 D4 5D)",
];
/// Revision, function, arguments, and the answer as acpiexec prints it.
type Call = (u32, u32, &'static str, &'static str);
/// Windows' calls of the TPM's physical presence (TCG PPI 1.3), but for the first. They ask for the
/// version, request to clear the TPM, ask what is requested, how the machine gets to firmware and
/// what firmware answered, tell the language, request once more, and ask what the user must
/// confirm.
const PRESENCE: [Call; 8] = [
    (1, 1, "[0]", "String] Length 03 = \"1.3\""),
    (1, 2, "[5]", "Integer] = 0000000000000000"),
    (
        1,
        3,
        "[0]",
        "Package] Contains 2 Elements:, Integer] = 0000000000000000, Integer] = 0000000000000005",
    ),
    (1, 4, "[0]", "Integer] = 0000000000000002"),
    (
        1,
        5,
        "[0]",
        "Package] Contains 3 Elements:, Integer] = 0000000000000000, \
                   Integer] = 0000000004040404, Integer] = 0000000004040404",
    ),
    (1, 6, "[\"en\"]", "Integer] = 0000000000000003"),
    (2, 7, "[6 0]", "Integer] = 0000000000000000"),
    (1, 8, "[5]", "Integer] = 0000000000000004"),
];
/// A request to clear memory at the next start (TCG MOR 1.1).
const CLEAR: Call = (1, 1, "[1]", "Integer] = 0000000000000000");
/// The memory that methods find: nothing is allowed, and no request waits; or firmware allows all
/// requests, without a person who confirms them.
const ZEROS: &str = "0";
const ALLOWED: &str = "4";

/// Tables of AML in a folder, for acpiexec.
pub(crate) struct Tables {
    folder: TempDir,
    files: Vec<String>,
    /// acpiexec's own `_OSI` strings, and the predefined objects of the tables.
    known: String,
}

impl Tables {
    pub(crate) fn new(tables: &BTreeMap<String, Vec<u8>>) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let aml = |name: &str| name.starts_with("DSDT") || name.starts_with("SSDT");
        let files: Vec<_> = tables.keys().filter(|name| aml(name)).cloned().collect();
        for name in &files {
            fs::write(folder.path().join(name), &tables[name])?;
        }
        ensure!(files.first().is_some_and(|it| it.starts_with("DSDT")), "no DSDT: {files:?}");
        let mut tables = Self { folder, files, known: String::new() };
        tables.known = tables.run(&["osi".into(), "predefined".into()], ZEROS)?;
        Ok(tables)
    }

    /// Fails if an object cannot be evaluated as one of these versions, or differs between them, or
    /// if the TPM gives another answer than it must. Returns the answers to `_OSC` and `_DSM`.
    pub(crate) fn evaluate(&self, versions: &[usize]) -> anyhow::Result<Vec<(String, String)>> {
        let mut first: Option<Vec<String>> = None;
        for &version in versions {
            let name = VERSIONS[version];
            let text = self.run(&self.commands(version), ZEROS)?;
            let answers = answers(&text).with_context(|| format!("as {name}"))?;
            let first = first.get_or_insert_with(|| answers.clone());
            ensure!(*first == answers, "{name} sees other objects than {}", VERSIONS[versions[0]]);
            self.ask_the_tpm(version).with_context(|| format!("as {name}"))?;
        }
        let answers = first.context("no version")?;
        eprintln!("{} versions evaluated {} lines", versions.len(), answers.len());
        Ok(facts(&answers))
    }

    /// The commands to acpiexec for one version.
    fn commands(&self, version: usize) -> Vec<String> {
        let mut commands = self.begin(version);
        commands.extend(OBJECTS.map(|name| format!("all {name}")));
        commands.push(OSC.into());
        for path in self.methods() {
            commands.extend(DSM.map(|uuid| format!("evaluate {path} {uuid} 1 0 [0]")));
        }
        commands
    }

    /// Makes acpiexec this version.
    fn begin(&self, version: usize) -> Vec<String> {
        let knows = |name: &str| self.known.lines().any(|line| line.trim() == name);
        let mut commands = Vec::new();
        for (place, name) in VERSIONS.iter().enumerate() {
            match (place <= version, knows(name)) {
                (true, false) => commands.push(format!("osi install \"{name}\"")),
                (false, true) => commands.push(format!("osi remove \"{name}\"")),
                _ => {}
            }
        }
        // The interrupt model of a system with an I/O APIC.
        commands.push("evaluate \\_PIC 1".into());
        commands
    }

    /// The paths of all `_DSM`.
    fn methods(&self) -> impl Iterator<Item = &str> {
        let paths = self.known.lines().filter_map(|line| line.split_ascii_whitespace().next());
        paths.filter(|path| path.ends_with("._DSM"))
    }

    /// Calls all functions of the TPM in turn, in one process: they leave requests in memory.
    fn ask_the_tpm(&self, version: usize) -> anyhow::Result<()> {
        let tpm = self.methods().find(|path| path.contains("TPM")).context("no TPM")?;
        let mut commands = self.begin(version);
        for (uuid, (revision, function, words, _)) in calls() {
            commands.push(format!("evaluate {tpm} {uuid} {revision} {function} {words}"));
        }
        let text = self.run(&commands, ALLOWED)?;
        let evaluation = format!("Evaluating {tpm}");
        let mut rest = text.split(&evaluation).skip(1);
        for (_, (revision, function, words, wanted)) in calls() {
            let said = rest.next().context("a call has no answer")?;
            let values = said.lines().filter_map(|line| line.trim().strip_prefix('['));
            let values: Vec<_> =
                values.map(|it| it.split("//").next().unwrap_or(it).trim()).collect();
            let call = format!("function {function} of revision {revision} with {words}");
            ensure!(values.join(", ") == wanted, "{call}: {values:?}, not {wanted}");
        }
        Ok(())
    }

    /// The output of commands, in a machine whose memory has this byte everywhere.
    fn run(&self, commands: &[String], memory: &str) -> anyhow::Result<String> {
        let input = self.folder.path().join("commands");
        fs::write(&input, commands.join("\n") + "\nquit\n")?;
        let mut command = Command::new("acpiexec");
        command.current_dir(self.folder.path()).args(["-fv", memory]).args(&self.files);
        let output = command.stdin(File::open(&input)?).output().context("acpiexec")?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        ensure!(output.status.success(), "acpiexec: {}\n{text}", output.status);
        Ok(text)
    }
}

fn calls() -> impl Iterator<Item = (&'static str, Call)> {
    PRESENCE.into_iter().map(|it| (DSM[1], it)).chain([(DSM[2], CLEAR)])
}

/// The answers to the methods: the buffer after each evaluation, without the path. The number is
/// that of the evaluation, since not every one is answered.
fn facts(answers: &[String]) -> Vec<(String, String)> {
    let mut facts: Vec<(String, String)> = Vec::new();
    let mut evaluations: BTreeMap<&str, usize> = BTreeMap::new();
    let mut method = None;
    for line in answers {
        if let Some(path) = line.strip_prefix("Evaluating ") {
            let name = path.trim().rsplit('.').next().unwrap_or_default();
            *evaluations.entry(name).or_default() += 1;
            method = Some(name);
        } else if let Some((name, (_, bytes))) = method.take().zip(line.split_once("0000: ")) {
            let bytes = bytes.split_once("//").map_or(bytes, |it| it.0).trim();
            facts.push((format!("acpi {name} #{}", evaluations[name]), bytes.to_owned()));
        }
    }
    facts
}

/// The lines from the first evaluation on, without the addresses in acpiexec's memory.
fn answers(text: &str) -> anyhow::Result<Vec<String>> {
    let errors: Vec<_> = text.lines().filter(|line| is_error(line)).collect();
    ensure!(errors.is_empty(), "acpiexec says:\n{}", errors.join("\n"));
    let lines = text.lines().skip_while(|line| !line.starts_with("Evaluating \\_PIC"));
    let lines = lines.filter(|line| {
        let is_echo = line.starts_with("- ");
        !is_echo
            && !line.contains("returned object")
            && !line.contains("Outstanding allocations after")
    });
    let lines: Vec<String> = lines.map(str::to_owned).collect();
    for name in OBJECTS {
        let evaluated = lines.iter().any(|line| line.contains(&format!("{name} ")));
        ensure!(evaluated, "acpiexec evaluated no {name}:\n{text}");
    }
    Ok(lines)
}

fn is_error(line: &str) -> bool {
    let code = line.split(|letter: char| !letter.is_ascii_uppercase() && letter != '_');
    let failed = code.into_iter().any(|word| word.starts_with("AE_") && word != "AE_OK");
    failed || line.contains("ACPI Error") || line.contains("ACPI BIOS") || line.contains("Warning")
}
