//! The command line: the table of commands. `config` has the options.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::ops::RangeInclusive;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;

use crate::config::{Config, OPTIONS};
use crate::control::host_usb::{self, HostUsb};
use crate::control::snapshot::{self, Secret};
use crate::control::{COMMANDS, Client, Command};
use crate::doctor::Targets;
use crate::machine::inspect;
use crate::snapshot::Snapshot;
use crate::status::{Failure, Status};
use crate::{doctor, reference, run, screenshot};
use host::keyvalue;

/// The file of `doctor --run`, if the command line names none.
const DOCTOR_REPORT: &str = "transom-doctor.json";
/// Its time, and the limits of `--seconds`.
const DOCTOR_LIMIT: Duration = Duration::from_secs(60);
const DOCTOR_LIMITS: RangeInclusive<u64> = 20..=3600;

struct Verb {
    name: &'static str,
    usage: &'static str,
    help: &'static str,
    run: fn(Vec<String>) -> anyhow::Result<u8>,
}

const VERBS: &[Verb] = &[
    Verb {
        name: "run",
        usage: "[OPTION...]",
        help: "Runs a machine. Without firmware and kernel, it runs the built-in probe, which \
               powers off at its end, or stays on the screen if the screen is served to viewers.",
        run: run_machine,
    },
    Verb {
        name: "inspect",
        usage: "[--json] [OPTION...]",
        help: "Shows the machine that `run` would build: memory, PCI, claims, ACPI.",
        run: inspect_machine,
    },
    Verb {
        name: "doctor",
        usage: "[--json] [--disk PATH] [--net TAP] [--run [--report FILE] [--kernel FILE] \
                [--modules FOLDER] [--seconds N]]",
        help: "Reports what this host can run. Exit status: 0 everything, 1 only the probe, 88 \
               nothing. Measures a disk, which is only read; the volume of a folder, with a file \
               that is written, verified and deleted; and a tap. If one of them fails, the status \
               is 1.\n\nWith --run, it tries this within a minute (--seconds for a \
               slow host): the probe with all its checks, \
               without and with Hyper-V's interface, a Linux with a device of each kind, and UEFI \
               firmware. The Linux is this host's kernel, or that of --kernel, with modules of \
               its release, or of --modules. Writes a report to send (default \
               transom-doctor.json), which names no host, user, address or serial number, and no \
               paths but those given here.",
        run: run_doctor,
    },
    Verb {
        name: "ctl",
        usage: "--control PATH COMMAND",
        help: "Controls a running machine. `vmm help ctl` lists the commands.",
        run: control,
    },
    Verb {
        name: "usb",
        usage: "[--control PATH KEY=VALUE[,KEY=VALUE...]...]",
        help: "Lists the USB devices of this host. With --control, attaches devices to a running \
               machine, and again whenever they are plugged in, until it is stopped; then it \
               unplugs them. They are written as for `usb-host`, as in \
               vendorid=0x0403,productid=0x6001 or hostbus=1,hostport=1.4.",
        run: usb,
    },
    Verb {
        name: "help",
        usage: "[run|devices|ctl|reference]",
        help: "Explains a command.",
        run: help,
    },
    Verb { name: "version", usage: "", help: "Prints the version.", run: version },
];

/// Returns the exit status.
pub fn execute(words: Vec<OsString>) -> anyhow::Result<u8> {
    let words = words.into_iter().map(|word| {
        let bad = |word: OsString| usage(format!("{} is not text", word.display()));
        word.into_string().map_err(bad)
    });
    let mut words: Vec<_> = words.collect::<anyhow::Result<_>>()?;
    if words.is_empty() {
        return explain("");
    }
    let name = match words.remove(0).as_str() {
        "-h" | "--help" => "help".to_owned(),
        "-V" | "--version" => "version".to_owned(),
        name => name.to_owned(),
    };
    let Some(verb) = VERBS.iter().find(|verb| verb.name == name) else {
        let names: Vec<_> = VERBS.iter().map(|verb| verb.name).collect();
        let hint = keyvalue::nearest(&name, &names)
            .map_or_else(|| "`vmm help` lists them".into(), |near| format!("did you mean {near}?"));
        return Err(usage(format!("there is no command {name}: {hint}")));
    };
    if words.iter().any(|word| word == "--help" || word == "-h") {
        return explain(verb.name);
    }
    (verb.run)(words)
}

fn usage(sentence: impl Into<String>) -> anyhow::Error {
    Failure::new(Status::Usage, sentence)
}

/// Ignores errors: a reader may close the pipe.
fn print(text: &str) -> anyhow::Result<u8> {
    std::io::stdout().write_all(text.as_bytes()).ok();
    Ok(0)
}

fn run_machine(words: Vec<String>) -> anyhow::Result<u8> {
    run::run(options(words)?)
}

fn inspect_machine(mut words: Vec<String>) -> anyhow::Result<u8> {
    let json = switch(&mut words, "--json");
    let config = options(words)?;
    let snapshot = config.restore.as_ref().map(Snapshot::open).transpose()?;
    let config = run::with_snapshot(config, snapshot.as_ref())?;
    print(&inspect::show(config, json)?)
}

fn run_doctor(mut words: Vec<String>) -> anyhow::Result<u8> {
    let [json, run] = ["--json", "--run"].map(|name| switch(&mut words, name));
    let net = value(&mut words, "--net")?;
    let mut path = |name| anyhow::Ok(value(&mut words, name)?.map(PathBuf::from));
    let (disk, report) = (path("--disk")?, path("--report")?);
    let (kernel, modules) = (path("--kernel")?, path("--modules")?);
    let seconds = value(&mut words, "--seconds")?;
    if let Some(word) = words.first() {
        let sentence = format!(
            "doctor takes --json, --disk PATH, --net TAP, and --run with --report FILE, --kernel \
             FILE, --modules FOLDER and --seconds N, not {word}"
        );
        return Err(usage(sentence));
    }
    let files = [&report, &kernel, &modules];
    if !run && (seconds.is_some() || files.into_iter().any(Option::is_some)) {
        return Err(usage("--report, --kernel, --modules and --seconds need --run"));
    }
    let limit = seconds.map_or(Ok(DOCTOR_LIMIT), |text| doctor_limit(&text))?;
    let targets = Targets { disk, net, kernel, modules, limit };
    if run {
        return try_host(&targets, &report.unwrap_or_else(|| DOCTOR_REPORT.into()), json);
    }
    let findings = doctor::examine(&targets)?;
    print(&findings.show(json)?)?;
    Ok(findings.status())
}

fn doctor_limit(text: &str) -> anyhow::Result<Duration> {
    let seconds = text.parse().ok().filter(|seconds| DOCTOR_LIMITS.contains(seconds));
    seconds.map(Duration::from_secs).ok_or_else(|| {
        let (least, most) = DOCTOR_LIMITS.into_inner();
        usage(format!("--seconds is a number from {least} to {most}, not {text:?}"))
    })
}

/// Runs all trials, and writes the report to a file, and to standard output as text or JSON.
fn try_host(targets: &Targets, path: &Path, json: bool) -> anyhow::Result<u8> {
    // Fail before the trials if the file cannot be written.
    let mut file = File::create(path).with_context(|| format!("--report {}", path.display()))?;
    let report = doctor::run(targets, &mut |text| {
        if !json {
            print(text).ok();
            std::io::stdout().flush().ok();
        }
    });
    let written = report.json()?;
    file.write_all(written.as_bytes()).with_context(|| format!("--report {}", path.display()))?;
    if json {
        print(&written)?;
    } else {
        print(&report.text()?)?;
        print(&format!("The report is in {}.\n", path.display()))?;
    }
    Ok(report.status())
}

fn control(mut words: Vec<String>) -> anyhow::Result<u8> {
    let path = value(&mut words, "--control")?;
    let path = path.ok_or_else(|| usage("ctl needs --control PATH, the socket of the machine"))?;
    if words.first().is_some_and(|word| word == "screenshot") {
        return screenshot(&path, &words[1..]);
    }
    let command = Command::read(&words).map_err(|error| usage(format!("{error:#}")))?;
    let file = host_device(&command)?;
    let mut client = Client::connect(Path::new(&path))?;
    let answer = match &command {
        Command::Snapshot { dir, then, within, key } => {
            let (then, key) = (then.unwrap_or_default(), key.as_deref());
            let derive = |path| Secret::open(path)?.for_snapshot();
            let key = key.map(derive).transpose()?;
            snapshot::save_with_key(&mut client, dir, then, *within, key.as_ref())?
        }
        Command::Migrate { to, pause, within } => {
            // The other end does not wait long after it is connected.
            let (pause, within) = (*pause, client.await_check(*within)?);
            let command = Command::Migrate { to: to.clone(), pause, within };
            let stream = UnixStream::connect(to)
                .with_context(|| format!("{}: start `vmm run --incoming` first", to.display()))?;
            client.pass(&command, &[stream.as_fd()])?
        }
        _ => client.ask_with(&command, file.as_ref().map(AsFd::as_fd).as_slice())?,
    };
    print(&format!("{answer:#}\n"))
}

/// Opens the USB device of this host that the command attaches. The machine could not in its jail.
fn host_device(command: &Command) -> anyhow::Result<Option<File>> {
    let Command::Attach { device, .. } = command else { return Ok(None) };
    let Some(filter) = host_usb::filter(device).map_err(|error| usage(format!("{error:#}")))?
    else {
        return Ok(None);
    };
    Ok(Some(filter.open()?.1))
}

fn usb(mut words: Vec<String>) -> anyhow::Result<u8> {
    let control = value(&mut words, "--control")?;
    let Some(control) = control.filter(|_| !words.is_empty()) else {
        if let Some(word) = words.first() {
            return Err(usage(format!("usb needs --control PATH before {word}")));
        }
        return print(&host_usb::show(&host::usb::list()?));
    };
    let mut devices = HostUsb::new(PathBuf::from(control));
    for word in &words {
        devices.add(word).map_err(|error| usage(format!("{error:#}")))?;
    }
    devices.run()?;
    Ok(0)
}

/// The client writes the file, because the machine may not create files: it sends only the picture.
fn screenshot(control: &str, words: &[String]) -> anyhow::Result<u8> {
    let [file] = words else {
        return Err(usage("screenshot needs one file to write: `screenshot FILE.png`"));
    };
    let (picture, pixels) = Client::connect(Path::new(control))?.screenshot()?;
    screenshot::write(picture, pixels, Path::new(file))?;
    Ok(0)
}

fn version(_: Vec<String>) -> anyhow::Result<u8> {
    print(concat!("vmm ", env!("CARGO_PKG_VERSION"), "\n"))
}

/// Removes a switch from the words. Returns whether it was there.
fn switch(words: &mut Vec<String>, name: &str) -> bool {
    let before = words.len();
    words.retain(|word| word != name);
    words.len() < before
}

/// Removes a flag and its value from the words: `--name value` or `--name=value`.
fn value(words: &mut Vec<String>, name: &str) -> anyhow::Result<Option<String>> {
    let inline = |word: &str| word.strip_prefix(name)?.strip_prefix('=').map(str::to_owned);
    let given = |word: &String| word == name || inline(word).is_some();
    let Some(at) = words.iter().position(given) else { return Ok(None) };
    if let Some(value) = inline(&words.remove(at)) {
        return Ok(Some(value));
    }
    if at == words.len() {
        return Err(usage(format!("{name} needs a value")));
    }
    Ok(Some(words.remove(at)))
}

/// Options of the command line override those of `--config FILE`.
fn options(mut words: Vec<String>) -> anyhow::Result<Config> {
    let file = value(&mut words, "--config")?;
    let mut config = match file {
        Some(path) if path == "-" => Config::from_reader(std::io::stdin(), "standard input")?,
        Some(path) => Config::from_file(&PathBuf::from(path))?,
        None => Config::default(),
    };
    let mut words = words.into_iter();
    while let Some(word) = words.next() {
        let Some(flag) = word.strip_prefix("--") else {
            let hint = "options begin with --, as in --memory 4G";
            return Err(usage(format!("{word} is not an option: {hint}")));
        };
        let (key, inline) = match flag.split_once('=') {
            Some((key, value)) => (key, Some(value.to_owned())),
            None => (flag, None),
        };
        let option = OPTIONS.iter().find(|option| option.key == key);
        let text = match (option, inline) {
            (_, Some(value)) => value,
            (Some(option), None) if !option.value.is_empty() => {
                let missing = || usage(format!("--{key} needs a value: {}", option.value));
                words.next().ok_or_else(missing)?
            }
            _ => String::new(),
        };
        config.set(key, &text)?;
    }
    Ok(config)
}

#[expect(clippy::needless_pass_by_value, reason = "the table of commands has one type")]
fn help(words: Vec<String>) -> anyhow::Result<u8> {
    explain(words.first().map_or("", String::as_str))
}

fn explain(topic: &str) -> anyhow::Result<u8> {
    match topic {
        "" => print(&overview()),
        "run" | "inspect" => print(&options_help(topic)),
        "devices" => print(&reference::devices()),
        "reference" => print(&reference::all()),
        "ctl" => print(&commands_help()),
        _ => {
            let verb = VERBS.iter().find(|verb| verb.name == topic);
            let Some(verb) = verb else {
                return Err(usage(format!("there is no help on {topic}")));
            };
            print(&format!("vmm {} {}\n\n{}\n", verb.name, verb.usage, verb.help))
        }
    }
}

fn overview() -> String {
    let mut text = String::from("vmm: runs a virtual machine on KVM.\n\n");
    for verb in VERBS {
        let call = format!("vmm {} {}", verb.name, verb.usage);
        writeln!(text, "  {}\n      {}", call.trim_end(), verb.help).expect("a string takes all");
    }
    text.push_str(
        "\nFirst steps:\n  vmm doctor\n  vmm run\n  \
         vmm run --memory 4G --cpus 4 --firmware OVMF_CODE_4M.fd --vars my-vars.fd\n",
    );
    text
}

fn options_help(verb: &str) -> String {
    let mut text = format!("vmm {verb} [--config FILE.json|-] [OPTION...]\n\n");
    text.push_str(
        "Each option is also a key of the JSON file. Options on the command line override the \
         file.\n\n",
    );
    for option in OPTIONS {
        let again = if option.repeats { " (may be given more than once)" } else { "" };
        let call = format!("--{} {}", option.key, option.value);
        writeln!(text, "  {}{again}\n     {}", call.trim_end(), option.help).expect("infallible");
    }
    text
}

fn commands_help() -> String {
    let mut text = String::from("vmm ctl --control PATH COMMAND\n\n");
    for usage in COMMANDS {
        writeln!(text, "  {:<32}{}", usage.call(), usage.help).expect("a string takes all");
    }
    text
}
