//! Downloads of media from a fake Microsoft, with every fault that it can have.

mod catalog;
#[path = "../esd/made.rs"]
mod made;
mod process;
#[path = "../programs/mod.rs"]
mod programs;
mod upgrade;
mod world;

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::thread;
use std::time::{Duration, Instant};

use container::download::transfer::forget_others;
use container::status::Status;
use fake_microsoft::fault::Fault;
use rustix::fs::{FlockOperation, flock};

use self::world::World;

const ADDRESS: &str = "https://files.example.test/dir/my.iso";

#[test]
fn a_file_arrives_in_parallel_ranges_under_its_name() {
    let world = World::new(vec![]);
    let path = world.run(&[("VERSION", ADDRESS)]).unwrap();
    assert_eq!(path.file_name().unwrap(), "my.iso");
    assert!(world.is_whole("my.iso"));
    assert_eq!(world.names(), ["my.iso"]);
    let requests = world.server.site.take_requests();
    let ranges = requests.iter().filter(|it| it.contains("my.iso bytes=")).count();
    assert!(ranges >= 5, "{requests:?}");
    let log = world.log();
    assert!(log[0].starts_with("Downloading ") && log[0].ends_with('…'), "{log:?}");
    assert!(log.iter().any(|line| line.contains(" 100% at ")), "{log:?}");
    let scene = world.story.scene().borrow().clone();
    assert_eq!(scene.thousandths, Some(1000));
}

#[test]
fn a_checksum_at_the_end_of_the_address_is_verified() {
    let world = World::new(vec![]);
    let right = format!("{ADDRESS}#sha256={}", world.server.site.sha256());
    world.run(&[("VERSION", &right)]).unwrap();
    assert!(world.log().iter().any(|line| line.contains("checksum is right")), "{:?}", world.log());
    for faults in [vec![Fault::Checksum], vec![Fault::Checksum, Fault::NoRanges]] {
        let world = World::new(faults);
        let (status, sentence) = world.refusal(&[("VERSION", &right)]);
        assert_eq!(status, Status::Download);
        assert!(sentence.contains("the SHA-256 checksum is"), "{sentence}");
        assert_eq!(world.names(), [""; 0]);
    }
    let (_, sentence) = world.refusal(&[("VERSION", &format!("{ADDRESS}x#sha256=12"))]);
    assert!(sentence.contains("64 hexadecimal digits"), "{sentence}");
}

#[test]
fn a_connection_that_breaks_goes_on_where_it_was() {
    let world = World::new(vec![Fault::Reset(60); 30]);
    world.run(&[("VERSION", ADDRESS)]).unwrap();
    assert!(world.is_whole("my.iso"));
    // Without ranges it starts again.
    let world = World::new(vec![Fault::Reset(60), Fault::NoRanges]);
    world.run(&[("VERSION", ADDRESS)]).unwrap();
    assert!(world.is_whole("my.iso"));
    let world = World::new(vec![Fault::Stall(60), Fault::Stall(10)]);
    world.run(&[("VERSION", ADDRESS)]).unwrap();
    assert!(world.is_whole("my.iso"));
}

#[test]
fn a_server_that_always_breaks_ends_the_download_and_keeps_what_came() {
    // Six parts arrive, and then none.
    let faults = [vec![Fault::Reset(100); 6], vec![Fault::Reset(0); 1000]].concat();
    let world = World::new(faults);
    let (status, sentence) = world.refusal(&[("VERSION", ADDRESS)]);
    assert_eq!(status, Status::Download);
    assert!(sentence.contains("the connection broke"), "{sentence}");
    assert_eq!(world.names(), ["my.iso.part", "my.iso.part.json"]);
    world.server.site.set_faults(vec![]);
    world.server.site.take_requests();
    world.run(&[("VERSION", ADDRESS)]).unwrap();
    assert!(world.is_whole("my.iso"));
    assert_eq!(world.names(), ["my.iso"]);
    let starts = world.server.site.take_requests();
    let again = starts.iter().filter(|it| it.contains("bytes=0-")).count();
    assert_eq!(again, 1, "only the first look: {starts:?}");
}

#[test]
fn answers_that_are_no_iso_are_refused_in_one_sentence() {
    for (fault, words) in [
        (Fault::Status(403), "403 Forbidden: the link may be over"),
        (Fault::Status(404), "there is no such file"),
        (Fault::Status(401), "give user and password"),
        (Fault::Status(503), "status 503"),
        (Fault::Html, "it is a web page"),
        (Fault::Changing, "a part of another file"),
        (Fault::Size(1 << 42), "bytes"),
        (Fault::Size(1 << 39), "enlarge the volume"),
    ] {
        let world = World::new(vec![fault.clone()]);
        let (status, sentence) = world.refusal(&[("VERSION", ADDRESS)]);
        assert_eq!(status, Status::Download);
        assert!(sentence.contains(words), "{fault:?}: {sentence}");
        assert_eq!(sentence.lines().count(), 1, "{sentence}");
        assert!(!world.names().iter().any(|name| name.ends_with(".iso")), "{:?}", world.names());
    }
}

/// No server, no name, no network, and a proxy that is none. The last one answers as the login page
/// of a hotel's network does.
#[test]
fn a_server_that_cannot_be_reached_is_named_with_the_reason() {
    let page = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let hotel = format!("http://{}", page.local_addr().unwrap());
    thread::spawn(move || {
        for mut stream in page.incoming().flatten() {
            let mut asked = [0; 4096];
            if stream.read(&mut asked).is_ok() {
                let answer =
                    "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<html>Log in</html>";
                stream.write_all(answer.as_bytes()).ok();
            }
        }
    });
    let nobody = "http://127.0.0.1:9";
    let world = World::new(vec![]);
    for (words, sentence) in [
        (
            &[("VERSION", "http://127.0.0.1:9/a.iso")][..],
            "127.0.0.1:9 cannot be reached: Connection",
        ),
        (
            &[("VERSION", "https://nowhere.invalid/a.iso"), ("HTTPS_PROXY", "")],
            "nowhere.invalid cannot be reached: failed to lookup address",
        ),
        (
            &[("VERSION", ADDRESS), ("HTTPS_PROXY", nobody)],
            "the proxy 127.0.0.1:9 cannot be reached",
        ),
        (
            &[("VERSION", ADDRESS), ("HTTPS_PROXY", &hotel)],
            "answers without TLS: the network may ask",
        ),
        (&[("VERSION", "11"), ("HTTPS_PROXY", nobody)], "the proxy 127.0.0.1:9 cannot be reached"),
        (&[("VERSION", "11"), ("HTTPS_PROXY", &hotel)], "answers without TLS: the network may ask"),
        (
            &[("VERSION", "2025"), ("HTTPS_PROXY", &hotel)],
            "answers without TLS: the network may ask",
        ),
    ] {
        let (status, said) = world.refusal(words);
        assert_eq!(status, Status::Download, "{words:?}: {said}");
        assert!(said.contains(sentence), "{words:?}: {said}");
        assert!(said.contains("mount") && said.contains("/custom.iso"), "{words:?}: {said}");
        assert_eq!(said.lines().count(), 1, "{said}");
        assert_eq!(world.names(), [""; 0], "{words:?}");
    }
}

#[test]
fn a_file_that_ends_early_or_is_no_cd_never_gets_its_name() {
    let cut = World::with(vec![], |bytes| bytes.truncate(bytes.len() / 2));
    let (_, sentence) = cut.refusal(&[("VERSION", ADDRESS)]);
    assert!(sentence.contains("cut off"), "{sentence}");
    let zip = World::with(vec![], |bytes| bytes[..4].copy_from_slice(b"PK\x03\x04"));
    let (_, sentence) = zip.refusal(&[("VERSION", ADDRESS)]);
    assert!(sentence.contains("ZIP archive"), "{sentence}");
    let zeros = World::with(vec![], |bytes| bytes.fill(0));
    let (_, sentence) = zeros.refusal(&[("VERSION", ADDRESS)]);
    assert!(sentence.contains("no file system of a CD"), "{sentence}");
    for world in [cut, zip, zeros] {
        assert_eq!(world.names(), [""; 0]);
    }
}

/// Each answer of a hostile mirror is one sentence, soon, and nothing is left.
#[test]
fn hostile_mirrors_gain_nothing() {
    let to = |url: &str| Fault::Redirect(url.into());
    for (fault, words) in [
        (to("file:///etc/passwd"), "is not the address of a file"),
        (to("ftp://files.example.test/my.iso"), "begins with neither https:// nor http://"),
        (to("http://files.example.test/my.iso"), "anyone on the way can replace the file"),
        (to("https://169.254.169.254/latest/meta-data"), "of this machine alone"),
        (to("https://[::ffff:127.0.0.1]/x"), "of this machine alone"),
        (to("https://192.168.0.1/admin?reboot"), "of an inner network"),
        (to("/dir/my.iso"), "redirects in circles"),
        (to("https:///"), "is not the address of a file"),
        (Fault::Endless, "it has no file system of a CD"),
        (Fault::Head, "the connection broke"),
        (Fault::Drip, "does not end its answer within"),
        (Fault::Bomb, "it has no file system of a CD"),
    ] {
        let mut world = World::new(vec![fault.clone()]);
        // The time for an answer is a multiple of this, and ends twice.
        world.patience.stall = Duration::from_millis(500);
        world.patience.failures = 2;
        let start = Instant::now();
        let (status, sentence) = world.refusal(&[("VERSION", ADDRESS)]);
        assert_eq!(status, Status::Download);
        assert!(sentence.contains(words), "{fault:?}: {sentence}");
        assert!(!sentence.contains(char::is_control), "{sentence}");
        assert_eq!(world.names(), [""; 0], "{fault:?}");
        assert!(start.elapsed() < Duration::from_secs(30), "{fault:?}: {:?}", start.elapsed());
    }
}

/// A mirror that is reached directly, by its address: it may lead to itself, and not further.
#[test]
fn only_the_users_address_may_be_an_inner_one() {
    let world = World::new(vec![]);
    let here = world.server.proxy();
    let direct = [("NO_PROXY", "*"), ("VERSION", &*format!("{here}/dir/my.iso"))];
    world.run(&direct).unwrap();
    assert!(world.is_whole("my.iso"));
    let login = here.replace("http://", "http://me:hush@");
    let words = [("NO_PROXY", "*"), ("VERSION", &*format!("{login}/dir/other.iso"))];
    let elsewhere = World::new(vec![]);
    let far = elsewhere.server.proxy();
    world.server.site.set_faults(vec![Fault::Redirect(format!("{far}/dir/other.iso"))]);
    world.run(&words).unwrap();
    // Another port is another server.
    let (own, others) = (world.server.site.take_logins(), elsewhere.server.site.take_logins());
    assert!(own.iter().any(|it| it == "Basic bWU6aHVzaA=="), "{own:?}");
    assert_eq!(others, [""; 0]);
}

#[test]
fn a_sidecar_of_another_file_is_not_used() {
    let world = World::new(vec![]);
    let length = world.iso.len();
    fs::write(world.place("my.iso.part"), vec![7; length]).unwrap();
    let other =
        format!("{{\"length\":{length},\"tag\":\"\\\"other\\\"\",\"done\":[[0,{length}]]}}");
    for sidecar in [&*other, "{\"length\":1,\"done\":[]}", "nonsense"] {
        fs::write(world.place("my.iso.part.json"), sidecar).unwrap();
        world.run(&[("VERSION", ADDRESS)]).unwrap();
        assert!(world.is_whole("my.iso"), "{sidecar}");
        fs::rename(world.place("my.iso"), world.place("my.iso.part")).unwrap();
    }
}

#[test]
fn unfinished_downloads_that_nobody_wants_are_removed() {
    let world = World::new(vec![Fault::Reset(0); 1000]);
    for name in ["my.iso", "other.iso"] {
        world.refusal(&[("VERSION", &format!("https://files.example.test/{name}"))]);
    }
    fs::write(world.place("theirs.iso.part"), "a browser's").unwrap();
    fs::write(world.place("odd.iso.part.json"), "{}").unwrap();
    let forget = |wanted: &[&str]| {
        let wanted: Vec<_> = wanted.iter().map(|name| world.place(name)).collect();
        let gone = forget_others(world.volume.path(), &wanted);
        gone.iter().map(|path| path.file_name().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(forget(&["my.iso", "other.iso"]), [""; 0]);
    let part = File::open(world.place("other.iso.part")).unwrap();
    flock(&part, FlockOperation::NonBlockingLockExclusive).unwrap();
    assert_eq!(forget(&["my.iso"]), [""; 0], "another pod downloads it");
    drop(part);
    assert_eq!(forget(&["my.iso"]), ["other.iso.part"]);
    assert_eq!(forget(&[]), ["my.iso.part"]);
    assert_eq!(world.names(), ["odd.iso.part.json", "theirs.iso.part"]);
}

#[test]
fn windows_11_comes_from_microsofts_page_with_its_checksum() {
    let world = World::new(vec![]);
    world.run(&[("VERSION", "11")]).unwrap();
    assert!(world.is_whole("win11x64.iso"));
    let log = world.log();
    for line in ["Requesting Windows 11 from the Microsoft servers…", "Downloading Windows 11…"]
    {
        assert!(log.iter().any(|it| it == line), "{log:?}");
    }
    assert!(log.iter().any(|line| line.contains("checksum is right")), "{log:?}");
    let world = World::new(vec![]);
    world.run(&[("VERSION", "11"), ("LANGUAGE", "Korean")]).unwrap();
    assert!(world.is_whole("win11x64_ko.iso"));
    // The links of the evaluation centre tell their language, or only where they lead.
    for fault in [None, Some(Fault::OneCulture)] {
        let world = World::new(fault.into_iter().collect());
        world.run(&[("VERSION", "2025"), ("LANGUAGE", "German")]).unwrap();
        assert!(world.is_whole("win2025-eval_de.iso"));
        let requests = world.server.site.take_requests();
        assert!(requests.iter().any(|it| it.contains("fake_x64_de-de.iso")), "{requests:?}");
        let english = requests.iter().any(|it| it.contains("fake_x64_en-us.iso"));
        assert!(!english, "{requests:?}");
    }
}

#[test]
fn a_language_that_is_not_to_be_had_is_english() {
    let world = World::new(vec![]);
    world.run(&[("VERSION", "11"), ("LANGUAGE", "Hebrew")]).unwrap();
    // Its name is that of the settings, by which later starts find it.
    assert!(world.is_whole("win11x64_he.iso"));
    let log = world.log();
    assert!(log.iter().any(|line| line.contains("not to be had in Hebrew")), "{log:?}");
}

#[test]
fn refusals_of_microsoft_are_told_with_the_way_out() {
    for (fault, words) in [
        (Fault::Sentinel, "refuses downloads to this address"),
        (Fault::Captcha, "has changed"),
        (Fault::PageStatus(403), "refused the request (status 403)"),
        (Fault::PageStatus(500), "status 500"),
        (Fault::Checksum, "the SHA-256 checksum is"),
        (Fault::Html, "it is a web page"),
    ] {
        let world = World::new(vec![fault.clone()]);
        let (status, sentence) = world.refusal(&[("VERSION", "11")]);
        assert_eq!(status, Status::Download);
        assert!(sentence.contains(words), "{fault:?}: {sentence}");
        assert!(sentence.contains("/custom.iso"), "{sentence}");
        assert_eq!(world.names(), [""; 0], "{fault:?}");
    }
    // The file at the fixed address is another one.
    let world = World::new(vec![Fault::Sentinel]);
    let (_, sentence) = world.refusal(&[("VERSION", "11")]);
    assert!(sentence.contains("the server has another file"), "{sentence}");
    let (_, sentence) = world.refusal(&[("VERSION", "11"), ("MIDO", "N")]);
    assert!(sentence.contains("MIDO=N"), "{sentence}");
}

#[test]
fn a_certificate_that_is_not_trusted_names_the_variable() {
    let world = World::new(vec![]);
    let proxy = world.server.proxy();
    let words = [("VERSION", ADDRESS), ("HTTPS_PROXY", &*proxy), ("SSL_CERT_FILE", "")];
    let (_, sentence) = world.refusal(&words);
    assert!(sentence.contains("not trusted") && sentence.contains("SSL_CERT_FILE"), "{sentence}");
    let (_, sentence) = world.refusal(&[("VERSION", ADDRESS), ("HTTPS_PROXY", "127.0.0.1:1")]);
    assert!(sentence.contains("the proxy 127.0.0.1:1 cannot be reached"), "{sentence}");
}

#[test]
fn two_downloads_of_one_file_do_not_mix() {
    let world = World::new(vec![Fault::Slow(8_000_000)]);
    let both = thread::scope(|scope| {
        let one = scope.spawn(|| world.run(&[("VERSION", ADDRESS)]));
        thread::sleep(Duration::from_millis(600));
        let two = world.run(&[("VERSION", ADDRESS)]);
        (one.join().unwrap(), two)
    });
    both.0.unwrap();
    let sentence = both.1.unwrap_err().to_string();
    assert!(sentence.contains("another pod downloads this file"), "{sentence}");
    assert!(world.is_whole("my.iso"));
}

#[test]
fn windows_drivers_come_from_their_address_with_its_checksum() {
    let world = World::new(vec![]);
    let mirror = format!("http://mirror.example.test/v.iso#sha256={}", world.server.site.sha256());
    let path = world.drivers(&mirror, None).unwrap();
    assert!(world.is_whole("virtio-win-v.iso"), "{}", path.display());
    let proxied = world.server.site.take_requests();
    assert!(proxied.iter().all(|it| !it.starts_with("CONNECT")), "{proxied:?}");
    let wrong = format!("https://mirror.example.test/w.iso#sha256={}", "0".repeat(64));
    fs::remove_file(path).unwrap();
    let error = world.drivers(&wrong, None).unwrap_err().to_string();
    assert!(error.contains("the SHA-256 checksum is") && error.contains("set DRIVERS"), "{error}");
    assert_eq!(world.names(), [""; 0]);
}

#[test]
fn the_usual_drivers_have_their_length_and_checksum() {
    let name = "virtio-win-0.1.271.iso";
    let world = World::new(vec![]);
    world.drivers("N", Some(world.usual())).unwrap();
    assert!(world.is_whole(name));
    let requests = world.server.site.take_requests();
    let place = format!(
        "fedorapeople.org/groups/virt/virtio-win/direct-downloads/archive-virtio/\
         virtio-win-0.1.271-1/{name}"
    );
    assert!(requests.iter().any(|it| it.starts_with(&place)), "{requests:?}");
    let of = |world: &World, place, usual| {
        let sentence = world.drivers(place, usual).unwrap_err().to_string();
        assert_eq!(world.names(), [""; 0]);
        sentence
    };
    let world = World::new(vec![Fault::Checksum]);
    let sentence = of(&world, "N", Some(world.usual()));
    assert!(sentence.contains("the SHA-256 checksum is"), "{sentence}");
    // A mirror of it is known by the file's name.
    let mirror = format!("https://mirror.example.test/{name}");
    let sentence = of(&World::new(vec![]), &mirror, None);
    assert!(sentence.contains("has 726501376: the server has another file"), "{sentence}");
}
