//! The command line: the table of commands, and their implementations.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;
use std::time::Duration;

use anyhow::bail;
use serde_json::json;

use crate::answer::xml::Secrets;
use crate::ask::{exec, seal};
use crate::plan::{Plan, answers};
use crate::settings::environment::{self, Environment};
use crate::settings::{Settings, near};
use crate::snapshots::create::{self, Wish};
use crate::snapshots::{self, Name, Shelf, restore};
use crate::status::{Failure, Status};
use crate::{ask, copy, help, plan, pod, suspended};

struct Command {
    name: &'static str,
    usage: &'static str,
    help: &'static str,
    run: fn(&[String]) -> anyhow::Result<u8>,
}

const COMMANDS: &[Command] = &[
    Command {
        name: "pod",
        usage: "",
        help: "Runs the machine that the environment describes, until it is off or a signal such \
               as SIGTERM arrives. The image runs this command by default.",
        run: run_pod,
    },
    Command {
        name: "plan",
        usage: "[--json]",
        help: "Reads the environment and shows settings that differ from the defaults, the size \
               of the machine, its source, the Windows and the drivers to install, and variables \
               without effect. If the plan cannot run, the exit status is that of the error.",
        run: show_plan,
    },
    Command {
        name: "download",
        usage: "",
        help: "Downloads the medium and Windows' drivers that the environment asks for onto the \
               volume, and ends. An unfinished download goes on where it was. `pod` does the same \
               when it needs them.",
        run: download,
    },
    Command {
        name: "answers",
        usage: "[--secrets] [FILE]",
        help: "Prints a file that Windows Setup gets, as the environment makes it: \
               Autounattend.xml (the default), SetupComplete.cmd, RunInstall.cmd, \
               ErrorHandler.cmd, install.bat (with COMMAND) or transom.cmd (with \
               INSTALLER=script). Passwords and keys are masked without --secrets. A mounted \
               /custom.xml takes the place of Autounattend.xml.",
        run: show_answers,
    },
    Command {
        name: "status",
        usage: "[--text]",
        help: "Prints the state of the machine as JSON, with the guest's if its agent answers, \
               and with the installation of Windows if one is reported. With --text, prints a \
               few lines for people.",
        run: show_status,
    },
    Command {
        name: "shutdown",
        usage: "[--wait SECONDS]",
        help: "Asks the guest to shut down, by its power button and by its agent. With --wait, \
               waits until it is off, at most SECONDS.",
        run: shut_down,
    },
    Command {
        name: "exec",
        usage: "[--timeout SECONDS] [-i] [--] PROGRAM [ARGUMENT...]",
        help: "Runs a program in the guest through its agent (qemu-guest-agent), prints the \
               output and exits with the program's status; 128 + N after signal N, 255 for a \
               status above 255. With -i (--interactive) the program reads standard input, up \
               to 1 MiB. 124: the timeout is over, and the program continues; 125: no agent \
               answers; 126: the agent cannot run the program; 127: it does not exist.",
        run: execute,
    },
    Command {
        name: "seal",
        usage: "[--as-it-is] [--unattend FILE] [--wait SECONDS]",
        help: "Makes the installed machine a base for others, which start from its volume with \
               BASE. Its guest gives up its identity through its agent (Windows by sysprep, with \
               --unattend as its answer file: a path in Windows) and shuts down, and the volume is \
               marked. With --as-it-is, the guest only shuts down. After SECONDS (1800) it fails.",
        run: seal,
    },
    Command {
        name: "cp",
        usage: "FILE - | --size BYTES - FILE",
        help: "Copies a file of the volume (STORAGE) to standard output, or standard input to a \
               new file there, and prints the number of bytes. Existing files are not replaced, \
               and the new one appears only if all BYTES came.",
        run: copy_file,
    },
    Command {
        name: "logs",
        usage: "[--follow] [--json]",
        help: "Prints the last lines of the container's log, up to 2000. With --follow, continues \
               with new lines. With --json, each line is an object.",
        run: show_logs,
    },
    Command {
        name: "probe",
        usage: "[live|started|ready]",
        help: "Checks the container's health, for exec probes: the status is 0 if it is good. The \
               default is ready: whether the guest is ready for use.",
        run: probe,
    },
    Command {
        name: "doctor",
        usage: "[--json] [--net TAP] [--run [--report FILE] [--kernel FILE] [--modules FOLDER] \
                [--seconds N]]",
        help: "Reports what this host can run, and how fast its volume is. With --run, it tries \
               this within a minute (--seconds for a slow host) with small guests, and writes a \
               report to send, without secrets, to transom-doctor.json on the volume. A Linux is \
               one of the guests if the host's /boot and /lib/modules are mounted, or --kernel \
               names one.",
        run: doctor,
    },
    Command {
        name: "screenshot",
        usage: "FILE.png",
        help: "Writes a picture of the screen to FILE.png.",
        run: take_picture,
    },
    Command {
        name: "usb",
        usage: "[attach|detach DEVICE]",
        help: "Lists the USB devices of the host, and those that the machine has. `attach` passes \
               one through to the machine, now and whenever it is plugged in; `detach` ends that. \
               DEVICE is vendorid=0x0403,productid=0x6001 or hostbus=1,hostport=1.4, or for \
               `detach` its name in the list.",
        run: usb,
    },
    Command {
        name: "snapshot",
        usage: "create NAME [--memory] [--pause] | list [--json] | restore NAME \
                [--drop-suspended] | delete NAME",
        help: "Snapshots of the disks on the volume, with the variables of the firmware and the \
               TPM. `create` asks the guest's agent to freeze its file systems for a moment; with \
               --memory it saves the memory, too, and a restored guest continues where it was. On \
               a volume that cannot clone files, it needs a machine that is off, or --pause: the \
               guest stands still while its disks are copied. `restore` needs a machine that is \
               off; the present disks are lost, and a suspended machine with --drop-suspended.",
        run: snapshot,
    },
    Command {
        name: "migrate",
        usage: "[--wait SECONDS] [--within SECONDS]",
        help: "Moves the running machine to another container on the same volume, which waits for \
               it: start both with SHUTDOWN=migrate. This container ends then. With --wait, waits \
               for the other one. With --within, gives up after this time, and the machine stays. \
               Stopping the container moves the machine, too.",
        run: migrate,
    },
    Command {
        name: "password",
        usage: "",
        help: "Prints the password of the screen, and in further lines the one for VNC viewers, \
               if VNC is enabled, and a generated one of Windows' account, if it is another. If \
               there is no password, reports why.",
        run: show_password,
    },
    Command {
        name: "help",
        usage: "[COMMAND|env [--markdown]]",
        help: "Explains a command; `help env` lists the variables of the environment.",
        run: explain,
    },
    Command { name: "version", usage: "", help: "Prints the version.", run: version },
];

/// The effect of a command line.
#[derive(Debug, PartialEq, Eq)]
pub enum Start {
    /// The pod. The entry point of the reference image ignores its arguments, so they have no
    /// effect here.
    Pod {
        ignored: Vec<String>,
    },
    Command(Vec<String>),
}

/// Decides what to start. `is_entry` is set for the first program of a container, whose words may
/// be the `command:` of Compose or the `args:` of Kubernetes.
pub fn start(program: &str, mut words: Vec<String>, is_entry: bool) -> Start {
    const ENTRY: &str = "entry.sh";
    let name = |path: &str| path.rsplit('/').next().unwrap_or_default().to_owned();
    match &*name(program) {
        // The image's own default, which some engines append.
        ENTRY if words == ["pod"] => return Start::Pod { ignored: Vec::new() },
        ENTRY => return Start::Pod { ignored: words },
        // Its options precede the program.
        "tini" => {
            let first = words.iter().position(|word| !word.starts_with('-'));
            words.drain(..first.unwrap_or(words.len()));
            let entry = words.first().is_some_and(|word| name(word) == ENTRY);
            return Start::Pod { ignored: words.split_off(usize::from(entry)) };
        }
        _ => {}
    }
    let known = |word: &String| {
        let known = names();
        let option = ["-h", "--help", "-V", "--version"].contains(&&**word);
        option || known.contains(&&**word) || near::nearest(word, &known).is_some()
    };
    match words.first() {
        Some(first) if is_entry && !known(first) => Start::Pod { ignored: words },
        _ => Start::Command(words),
    }
}

fn names() -> Vec<&'static str> {
    COMMANDS.iter().map(|verb| verb.name).collect()
}

/// Runs the command line. Returns the exit status.
pub fn run(words: impl Iterator<Item = OsString>) -> anyhow::Result<u8> {
    let words = words.map(|word| {
        word.into_string().map_err(|word| usage(format!("{} is not text", word.display())))
    });
    let mut words = words.collect::<anyhow::Result<Vec<_>>>()?.into_iter();
    let program = words.next().unwrap_or_default();
    // With an init program, the entry point is its child. Commands that an engine starts in a
    // running container have a parent outside.
    let is_entry = std::process::id() == 1 || std::os::unix::process::parent_id() == 1;
    match start(&program, words.collect(), is_entry) {
        Start::Pod { ignored } => pod::run(&std::env::vars_os().collect(), &ignored),
        Start::Command(words) => run_command(words),
    }
}

fn run_command(mut words: Vec<String>) -> anyhow::Result<u8> {
    if words.is_empty() {
        return explain(&[]);
    }
    let name = match words.remove(0).as_str() {
        "-h" | "--help" => "help".to_owned(),
        "-V" | "--version" => "version".to_owned(),
        name => name.to_owned(),
    };
    let Some(verb) = COMMANDS.iter().find(|verb| verb.name == name) else {
        let out = match near::nearest(&name, &names()) {
            Some(near) => format!("did you mean {near}?"),
            None => "`transom help` lists all commands".to_owned(),
        };
        return Err(usage(format!("there is no command {name}: {out}")));
    };
    // Options after the program belong to the program.
    let own = if verb.name == "exec" { words.len().min(1) } else { words.len() };
    if words[..own].iter().any(|word| word == "--help" || word == "-h") {
        return explain(&[verb.name.to_owned()]);
    }
    (verb.run)(&words)
}

fn usage(sentence: impl Into<String>) -> anyhow::Error {
    Failure::new(Status::Usage, sentence)
}

/// A reader that closed the pipe is not an error.
fn print(text: &str) -> anyhow::Result<u8> {
    std::io::stdout().write_all(text.as_bytes()).ok();
    Ok(0)
}

fn download(words: &[String]) -> anyhow::Result<u8> {
    alone("download", words)?;
    pod::fetch::download(&std::env::vars_os().collect())
}

fn run_pod(words: &[String]) -> anyhow::Result<u8> {
    if !words.is_empty() {
        return Err(usage(
            "pod takes no arguments: set variables of the environment (transom help env)",
        ));
    }
    pod::run(&std::env::vars_os().collect(), &[])
}

fn show_status(words: &[String]) -> anyhow::Result<u8> {
    match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => print(&ask::status()?),
        ["--text"] => print(&ask::status_text()?),
        _ => Err(usage("status takes only --text")),
    }
}

fn shut_down(words: &[String]) -> anyhow::Result<u8> {
    let wait = match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => None,
        ["--wait", seconds] => {
            let number = seconds.parse().ok().map(Duration::from_secs);
            Some(
                number
                    .ok_or_else(|| usage(format!("--wait {seconds}: not a number of seconds")))?,
            )
        }
        _ => return Err(usage("shutdown takes only --wait SECONDS")),
    };
    ask::shutdown(wait)?;
    Ok(0)
}

fn execute(words: &[String]) -> anyhow::Result<u8> {
    let (mut words, mut limit, mut reads) = (words, None, false);
    loop {
        match words {
            [option, seconds, rest @ ..] if option == "--timeout" => {
                let number = seconds.parse().ok().map(Duration::from_secs);
                let wrong = || usage(format!("{option} {seconds}: not a number of seconds"));
                let number = number.ok_or_else(wrong);
                (limit, words) = (Some(number?), rest);
            }
            [option, rest @ ..] if option == "-i" || option == "--interactive" => {
                (reads, words) = (true, rest);
            }
            [end, rest @ ..] if end == "--" => {
                words = rest;
                break;
            }
            [option, ..] if option.starts_with('-') => {
                return Err(usage(format!("exec: {option} is unknown, or lacks its value")));
            }
            _ => break,
        }
    }
    let [program, rest @ ..] = words else { return Err(usage("exec needs a program")) };
    let input = if reads { Some(exec::input(std::io::stdin())?) } else { None };
    let ended = exec::run(program, rest, input, limit)?;
    // A reader that closed the pipe is not an error.
    std::io::stdout().write_all(&ended.output).ok();
    let mut errors = std::io::stderr();
    errors.write_all(&ended.errors).ok();
    if ended.cut {
        writeln!(errors, "transom: output is cut: the agent keeps no more").ok();
    }
    if let Some(status) = ended.odd {
        writeln!(errors, "transom: the program ended with {status}").ok();
    }
    Ok(ended.status)
}

fn seal(words: &[String]) -> anyhow::Result<u8> {
    let mut options = seal::Options { as_it_is: false, unattend: None, wait: seal::TIMEOUT };
    let mut words = words;
    loop {
        words = match words {
            [] => break,
            [option, rest @ ..] if option == "--as-it-is" => {
                options.as_it_is = true;
                rest
            }
            [option, path, rest @ ..] if option == "--unattend" => {
                options.unattend = Some(path.clone());
                rest
            }
            [option, seconds, rest @ ..] if option == "--wait" => {
                let number = seconds.parse().ok().map(Duration::from_secs);
                let wrong = || usage(format!("{option} {seconds}: not a number of seconds"));
                options.wait = number.ok_or_else(wrong)?;
                rest
            }
            [option, ..] => {
                return Err(usage(format!("seal: {option} is unknown, or lacks its value")));
            }
        };
    }
    if options.as_it_is && options.unattend.is_some() {
        return Err(usage("seal takes --as-it-is or --unattend FILE, not both"));
    }
    let tell = |line: &str| {
        writeln!(std::io::stderr(), "{line}").ok();
    };
    seal::run(&settings()?, &options, tell)?;
    print(
        "sealed: mount this volume read-only at /base, and start other machines with BASE=/base\n",
    )
}

fn copy_file(words: &[String]) -> anyhow::Result<u8> {
    let words: Vec<_> = words.iter().map(String::as_str).collect();
    let direction = copy::direction(&words).map_err(usage)?;
    let volume = settings()?.storage.folder;
    let (mut input, mut output) = (std::io::stdin().lock(), std::io::stdout().lock());
    let bytes = copy::run(&direction, &volume, &mut input, &mut output)?;
    writeln!(std::io::stderr(), "{bytes} bytes copied").ok();
    Ok(0)
}

fn show_logs(words: &[String]) -> anyhow::Result<u8> {
    let has = |name: &str| words.iter().any(|word| word == name);
    let (follow, json) = (has("--follow") || has("-f"), has("--json"));
    if let Some(word) = words.iter().find(|it| !["--follow", "-f", "--json"].contains(&&***it)) {
        return Err(usage(format!("logs takes only --follow and --json, not {word}")));
    }
    let mut out = std::io::stdout();
    ask::logs(follow, |number, line| {
        if !json {
            return writeln!(out, "{:>5} {}", line.level, line.text);
        }
        let (seconds, level, text) = (line.seconds, &line.level, &line.text);
        let line = json!({ "number": number, "seconds": seconds, "level": level, "text": text });
        writeln!(out, "{line}")
    })?;
    Ok(0)
}

fn probe(words: &[String]) -> anyhow::Result<u8> {
    let word = match words {
        [] => "ready",
        [word] => word.as_str(),
        _ => return Err(usage("probe takes one argument: live, started or ready")),
    };
    let health = ask::PROBES.iter().find(|(name, _)| *name == word);
    let unknown = || usage(format!("there is no probe {word}: say live, started or ready"));
    let (_, health) = health.ok_or_else(unknown)?;
    print(&ask::probe(*health)?)
}

fn doctor(words: &[String]) -> anyhow::Result<u8> {
    ask::doctor(&settings()?, words)
}

fn settings() -> anyhow::Result<Settings> {
    Ok(environment::read(&std::env::vars_os().collect())?.settings)
}

fn take_picture(words: &[String]) -> anyhow::Result<u8> {
    let [path] = words else { return Err(usage("screenshot needs the name of a file")) };
    ask::screenshot(Path::new(path))?;
    Ok(0)
}

fn show_password(words: &[String]) -> anyhow::Result<u8> {
    alone("password", words)?;
    print(&ask::password()?)
}

fn usb(words: &[String]) -> anyhow::Result<u8> {
    match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => print(&ask::usb()?),
        ["attach", device] => print(&ask::attach_usb(device)?),
        ["detach", device] => {
            ask::detach_usb(device)?;
            Ok(0)
        }
        _ => Err(usage("usb takes nothing, or attach DEVICE, or detach DEVICE")),
    }
}

fn migrate(words: &[String]) -> anyhow::Result<u8> {
    let (mut words, mut wait, mut within) = (words, Duration::ZERO, None);
    while let [option, rest @ ..] = words {
        let wrong = || usage(format!("migrate: {option} is unknown, or lacks its seconds"));
        let [seconds, rest @ ..] = rest else { return Err(wrong()) };
        let seconds = seconds.parse().map(Duration::from_secs).map_err(|_| wrong())?;
        match &**option {
            "--wait" => wait = seconds,
            "--within" => within = Some(seconds),
            _ => return Err(wrong()),
        }
        words = rest;
    }
    print(&ask::migrate(wait, within)?)
}

fn snapshot(words: &[String]) -> anyhow::Result<u8> {
    let settings = settings()?;
    let shelf = Shelf::new(&settings, Path::new("/"));
    let words: Vec<_> = words.iter().map(String::as_str).collect();
    let name = |text: &str| Name::read(text).map_err(|error| usage(error.to_string()));
    match words[..] {
        ["create", text, ref options @ ..] => {
            let has = |option| options.contains(&option);
            let known = |option: &&str| ["--memory", "--pause"].contains(option);
            if let Some(word) = options.iter().find(|option| !known(option)) {
                return Err(usage(format!(
                    "snapshot create takes --memory and --pause, not {word}"
                )));
            }
            let wish = Wish { memory: has("--memory"), pause: has("--pause") };
            let root = Path::new("/");
            let secret = if wish.memory { suspended::secret(&settings, root)? } else { None };
            // The guest does not stand still for it yet.
            let key = secret.map(|secret| secret.for_snapshot()).transpose()?;
            let mut pod = ask::snapshot::pod(key);
            let pod = pod.as_mut().map(|pod| pod as &mut dyn create::Pod);
            print(&snapshots::show::made(&create::create(shelf, &name(text)?, wish, pod)?))
        }
        ["list"] => print(&snapshots::show::table(&shelf.list()?)),
        ["list", "--json"] => print(&snapshots::show::json(&shelf.list()?)),
        ["restore", text, ref options @ ..] if matches!(options, [] | ["--drop-suspended"]) => {
            if ask::snapshot::pod(None).is_some() {
                bail!(
                    "a machine runs in this container: stop it, and restore with a container that \
                     runs `snapshot restore {text}` on the same volume"
                );
            }
            let restored = restore::restore(shelf, &name(text)?, !options.is_empty())?;
            print(&snapshots::show::restored(&restored))
        }
        ["delete", text] => {
            let name = name(text)?;
            shelf.delete(&name)?;
            print(&snapshots::show::deleted(&name))
        }
        _ => Err(usage(
            "snapshot takes create NAME [--memory] [--pause], list [--json], restore NAME \
             [--drop-suspended], or delete NAME",
        )),
    }
}

fn alone(verb: &str, words: &[String]) -> anyhow::Result<()> {
    if words.is_empty() { Ok(()) } else { Err(usage(format!("{verb} takes no arguments"))) }
}

fn show_plan(words: &[String]) -> anyhow::Result<u8> {
    let json = match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => false,
        ["--json"] => true,
        _ => return Err(usage("plan takes only --json")),
    };
    let environment: Environment = std::env::vars_os().collect();
    let plan = Plan::make(&environment, Path::new("/"));
    let kvm = Path::new("/dev/kvm");
    print(&if json { plan::json(&plan, kvm) } else { plan::text(&plan) })?;
    match plan {
        Ok(plan) => {
            let missing = plan.download_error().or_else(|| plan.drivers_error());
            missing.or_else(|| plan.kvm_error(kvm)).map_or(Ok(0), Err)
        }
        Err(error) => Err(error),
    }
}

fn show_answers(words: &[String]) -> anyhow::Result<u8> {
    let is_option = |word: &&String| word.starts_with('-');
    let (options, names): (Vec<_>, Vec<_>) = words.iter().partition(is_option);
    if let Some(word) = options.iter().find(|word| **word != "--secrets") {
        return Err(usage(format!("answers takes only --secrets, not {word}")));
    }
    let name = match names[..] {
        [] => answers::DEFAULT,
        [name] => name.as_str(),
        _ => return Err(usage("answers takes one FILE")),
    };
    let secrets = if options.is_empty() { Secrets::Masked } else { Secrets::Shown };
    let environment: Environment = std::env::vars_os().collect();
    let (bytes, warnings) = answers::file(&environment, Path::new("/"), name, secrets)?;
    std::io::stdout().write_all(&bytes).ok();
    for warning in warnings {
        writeln!(std::io::stderr(), "warning: {warning}").ok();
    }
    Ok(0)
}

fn version(_: &[String]) -> anyhow::Result<u8> {
    print(concat!("transom ", env!("CARGO_PKG_VERSION"), "\n"))
}

fn explain(words: &[String]) -> anyhow::Result<u8> {
    match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => print(&overview()),
        ["env"] => print(&help::table(help::width())),
        ["env", "--markdown"] => print(&help::markdown()),
        [topic] => {
            let verb = COMMANDS.iter().find(|verb| verb.name == topic);
            let verb = verb.ok_or_else(|| usage(format!("there is no command {topic}")))?;
            let call = format!("transom {} {}", verb.name, verb.usage);
            print(&format!("{}\n\n{}\n", call.trim_end(), verb.help))
        }
        _ => Err(usage("help takes one command, or env [--markdown]")),
    }
}

fn overview() -> String {
    let mut text = String::from("transom: the entry point of the container.\n\n");
    for verb in COMMANDS {
        let call = format!("transom {} {}", verb.name, verb.usage);
        writeln!(text, "  {}\n      {}", call.trim_end(), verb.help).expect("a string takes all");
    }
    text
}
